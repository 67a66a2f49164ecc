// 2^x within 2 ulp (PTX ISA, ex2.approx.ftz), 0 where that is below the normal range.
__device__ inline float power_of_twof(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
