// log2(2^x + 2^y), from the larger one (LogAddExpKernel.cu); two equal infinities stay.
__device__ inline float logaddexp2f(float x, float y) {
    const float larger = maximumf(x, y);
    const float rest = log1p_unitf(exp2f(-fabsf(x - y))) * 1.44269502f;
    return x == y && fabsf(x) == INFINITY ? x : larger + rest;
}
