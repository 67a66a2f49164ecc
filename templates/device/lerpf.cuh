// From x to y, formed at the nearer end (ATen/native/Lerp.h).
__device__ inline float lerpf(float x, float y, float weight) {
    return fabsf(weight) < 0.5f ? x + weight * (y - x) : y - (y - x) * (1.0f - weight);
}
