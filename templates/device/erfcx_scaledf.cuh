// exp(x^2) erfc(x). Below -9.39 it overflows.
__device__ inline float erfcx_scaledf(float x) {
    const float fit = erfcx_fitf(fmaf(fabsf(x), 0.414731354f, 1.0f));
    return x >= 0.0f ? fit : 2.0f * exp_squaref(maximumf(x, -9.4f), 1.0f) - fit;
}
