// The normal distribution function.
__device__ inline float normal_cdff(float x) {
    if (fabsf(x) < 1.0f) return 0.5f + 0.5f * erff(x * 0.707106769f);
    const float tail = normal_tailf(x);
    return x < 0.0f ? tail : 1.0f - tail;
}
