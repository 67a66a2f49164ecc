// GELU's tanh approximation (ATen/native/cuda/ActivationGeluKernel.cu) with (1 + tanh(z)) / 2
// written as the logistic function of 2z, which keeps its digits below 0.
__device__ inline float gelu_tanhf(float x) {
    return x * sigmoidf(1.59576912f * (x + 0.044715f * x * x * x));
}
