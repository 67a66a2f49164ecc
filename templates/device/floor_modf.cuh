// The remainder with the sign of the divisor (BinaryRemainderKernel.cu).
__device__ inline float floor_modf(float x, float y) {
    const float mod = fmodf(x, y);
    return mod != 0.0f && (y < 0.0f) != (mod < 0.0f) ? mod + y : mod;
}
