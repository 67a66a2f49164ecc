// 1 / x for x from 1 on, within 1 ulp (PTX ISA, rcp.approx.ftz), and 0 past 2^126. An IEEE division
// is ten instructions and a branch, which keeps the elements of a pack from overlapping.
__device__ inline float reciprocalf(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}
