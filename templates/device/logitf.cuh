// log(x / (1 - x)), as PyTorch forms it (UnarySpecialOpsKernel.cu).
__device__ inline float logitf(float x) { return logf(x / (1.0f - x)); }
