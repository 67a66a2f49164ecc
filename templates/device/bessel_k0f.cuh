// The modified Bessel function K0, times exp(x) where `scaled`: up to 2 its regular part and I0 are
// least-maximum fits in x^2 to 1.2e-8 (Abramowitz and Stegun, 9.6.13), above that
// sqrt(x) exp(x) K0(x) is one in 1 / x to 8e-9.
__device__ inline float bessel_k0f(float x, bool scaled) {
    if (x <= 2.0f) {
        const float z = x * x;
        float p = 1.28051624e-07f;
        p = fmaf(p, z, 1.01497399e-05f);
        p = fmaf(p, z, 0.000545347459f);
        p = fmaf(p, z, 0.0144183245f);
        p = fmaf(p, z, 0.105696164f);
        p = fmaf(p, z, -0.577215672f);
        float i = 7.29610932e-08f;
        i = fmaf(i, z, 6.76223226e-06f);
        i = fmaf(i, z, 0.000434057962f);
        i = fmaf(i, z, 0.0156249842f);
        i = fmaf(i, z, 0.25f);
        i = fmaf(i, z, 1.0f);
        const float log = x < 1.0e-30f ? logf(x) - 0.693147182f : logf(0.5f * x);
        const float k = fmaf(-log, i, p);
        return scaled ? k * expf(x) : k;
    }
    const float w = 1.0f / x;
    float p = -0.0522748753f;
    p = fmaf(p, w, 0.127924621f);
    p = fmaf(p, w, -0.14759028f);
    p = fmaf(p, w, 0.118301377f);
    p = fmaf(p, w, -0.0896145254f);
    p = fmaf(p, w, 0.0880159885f);
    p = fmaf(p, w, -0.156662419f);
    p = fmaf(p, w, 1.25331414f);
    p *= sqrtf(w);
    return scaled ? p : p * expf(-x);
}
