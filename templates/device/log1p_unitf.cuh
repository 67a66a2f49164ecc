// log(1 + x) for x in [0, 1], without the branches of log1pf: 2 atanh(s) with s = x / (2 + x), its
// series in s^2 a least-maximum fit to 4.5e-9.
__device__ inline float log1p_unitf(float x) {
    const float s = x * reciprocalf(2.0f + x);
    const float z = s * s;
    float p = 0.280119867f;
    p = fmaf(p, z, 0.280018053f);
    p = fmaf(p, z, 0.400215272f);
    p = fmaf(p, z, 0.666664163f);
    return fmaf(p * z, s, 2.0f * s);
}
