__device__ inline float siluf(float x) { return x * sigmoidf(x); }
