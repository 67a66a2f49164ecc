// The modified Bessel function K1, times exp(x) where `scaled`: up to 2 its regular part and
// I1(x) / x are least-maximum fits in x^2 to 3e-10 (Abramowitz and Stegun, 9.6.11), above that
// sqrt(x) exp(x) K1(x) is one in 1 / x to 9e-9.
__device__ inline float bessel_k1f(float x, bool scaled) {
    if (x == 0.0f) return INFINITY;
    if (x <= 2.0f) {
        const float z = x * x;
        float p = -1.10877503e-08f;
        p = fmaf(p, z, -1.0836751e-06f);
        p = fmaf(p, z, -7.49458995e-05f);
        p = fmaf(p, z, -0.00283709005f);
        p = fmaf(p, z, -0.0420490354f);
        p = fmaf(p, z, 0.0386078358f);
        p = fmaf(p, z, 1.0f);
        float i = 6.01649397e-09f;
        i = fmaf(i, z, 6.76795651e-07f);
        i = fmaf(i, z, 5.42555827e-05f);
        i = fmaf(i, z, 0.00260416558f);
        i = fmaf(i, z, 0.0625f);
        i = fmaf(i, z, 0.5f);
        const float k = fmaf(logf(0.5f * x), x * i, p / x);
        return scaled ? k * expf(x) : k;
    }
    const float w = 1.0f / x;
    float p = 0.0652532354f;
    p = fmaf(p, w, -0.160252824f);
    p = fmaf(p, w, 0.187046766f);
    p = fmaf(p, w, -0.154594645f);
    p = fmaf(p, w, 0.125964612f);
    p = fmaf(p, w, -0.146747798f);
    p = fmaf(p, w, 0.469990671f);
    p = fmaf(p, w, 1.25331414f);
    p *= sqrtf(w);
    return scaled ? p : p * expf(-x);
}
