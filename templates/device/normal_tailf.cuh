// The normal distribution function of -|x|, which is exp(-x^2 / 2) erfcx(|x| / sqrt 2) / 2; 0 past
// 15.
__device__ inline float normal_tailf(float x) {
    const float size = minimumf(fabsf(x), 15.0f);
    const float fit = erfcx_fitf(fmaf(size, 0.293259352f, 1.0f));
    return 0.5f * fit * exp_squaref(size, -0.5f);
}
