// The logarithm of the normal distribution function, by its tail where that is the smaller part.
__device__ inline float log_normal_cdff(float x) {
    if (x > 0.0f) return log1pf(-normal_cdff(-x));
    if (x > -1.0f) return logf(normal_cdff(x));
    const float fit = erfcx_fitf(fmaf(-x, 0.293259352f, 1.0f));
    return logf(0.5f * fit) - 0.5f * x * x;
}
