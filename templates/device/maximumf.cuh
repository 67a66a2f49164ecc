// max as PyTorch has it on a GPU: a NaN in either operand wins, +0 beats -0. The instruction for
// that came with sm_80.
__device__ inline float maximumf(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#else
    return x != x ? x : y != y ? y : fmaxf(x, y);
#endif
}
