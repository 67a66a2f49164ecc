// The derivative of log(gamma(x)), below 0 by reflection: in double, as its two parts cancel. A
// pole is NaN, 0 an infinity (ATen/native/cuda/Math.cuh).
__device__ inline float digammaf(float x) {
    if (x == 0.0f) return copysignf(INFINITY, -x);
    if (x >= 2.0f) return digamma_positive(x);
    if (x >= 1.0f) return digamma_nearf(x);
    if (!(x < 0.0f)) return digamma_nearf(x + 1.0f) - 1.0f / x;
    const double fraction = x - truncf(x);
    if (fraction == 0.0) return NAN;
    const double pi = 3.14159265358979324;
    return digamma_positive(1.0 - x) - pi / tan(pi * fraction);
}
