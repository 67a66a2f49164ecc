// Towards zero by lambda; a NaN stays.
__device__ inline float softshrinkf(float x, float lambda) {
    return x != x ? x : x > lambda ? x - lambda : x < -lambda ? x + lambda : 0.0f;
}
