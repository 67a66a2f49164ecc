// exp(u^2) erfc(u) where d = 1 + 0.414731354 u, u >= 0: P(1 / d) / d, P a least-maximum fit to
// 5.6e-9.
__device__ inline float erfcx_fitf(float d) {
    const float t = 1.0f / d;
    float p = 0.0154806962f;
    p = fmaf(p, t, -0.109051965f);
    p = fmaf(p, t, 0.300489247f);
    p = fmaf(p, t, -0.388161063f);
    p = fmaf(p, t, 0.219736621f);
    p = fmaf(p, t, -0.0944550857f);
    p = fmaf(p, t, 0.0862561166f);
    p = fmaf(p, t, 0.113819033f);
    p = fmaf(p, t, 0.174070626f);
    p = fmaf(p, t, 0.213841096f);
    p = fmaf(p, t, 0.23398757f);
    p = fmaf(p, t, 0.233987108f);
    return p / d;
}
