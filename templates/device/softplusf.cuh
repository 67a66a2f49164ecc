// log(1 + exp(beta x)) / beta, with the exponential of -|beta x|; x itself past the threshold.
__device__ inline float softplusf(float x, float beta, float threshold) {
    const float v = x * beta;
    const float log = maximumf(v, 0.0f) + log1p_unitf(expf(-fabsf(v)));
    return v > threshold ? x : log * (1.0f / beta);
}
