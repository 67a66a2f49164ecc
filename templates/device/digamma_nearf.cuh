// digamma in [1, 2] as the distance from its zero there, 1.46163213 + 1.2438e-8, times a
// least-maximum fit to 1.7e-8.
__device__ inline float digamma_nearf(float x) {
    const float d = (x - 1.46163213f) - 1.24381499e-08f;
    float p = 0.0124428282f;
    p = fmaf(p, d, -0.0193228796f);
    p = fmaf(p, d, 0.0217588581f);
    p = fmaf(p, d, -0.0325585604f);
    p = fmaf(p, d, 0.0491196252f);
    p = fmaf(p, d, -0.0722261667f);
    p = fmaf(p, d, 0.107777663f);
    p = fmaf(p, d, -0.163943112f);
    p = fmaf(p, d, 0.258501977f);
    p = fmaf(p, d, -0.44276315f);
    p = fmaf(p, d, 0.967672229f);
    return p * d;
}
