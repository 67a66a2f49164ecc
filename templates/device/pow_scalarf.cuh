// x^y for one y: PyTorch takes a root where y is one half, which differs from pow at -0 and -inf.
__device__ inline float pow_scalarf(float x, float y) {
    return y == 0.5f ? sqrtf(x) : y == -0.5f ? rsqrtf(x) : powf(x, y);
}
