// GELU's tanh approximation (ATen/native/cuda/ActivationGeluKernel.cu).
__device__ inline float gelu_tanhf(float x) {
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}
