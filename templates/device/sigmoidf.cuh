// 1 / (1 + exp(-x)), with the exponential of -|x| so that nothing overflows and the far negative
// end keeps its digits.
__device__ inline float sigmoidf(float x) {
    const float e = expf(-fabsf(x));
    const float r = reciprocalf(1.0f + e);
    return x < 0.0f ? e * r : r;
}
