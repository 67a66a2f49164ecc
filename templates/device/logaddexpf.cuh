// log(exp(x) + exp(y)), from the larger one (LogAddExpKernel.cu); two equal infinities stay.
__device__ inline float logaddexpf(float x, float y) {
    const float larger = maximumf(x, y);
    return x == y && fabsf(x) == INFINITY ? x : larger + log1p_unitf(expf(-fabsf(x - y)));
}
