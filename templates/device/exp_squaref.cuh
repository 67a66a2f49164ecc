// exp(scale x^2) with the part of x^2 that its rounding drops, which counts far out.
__device__ inline float exp_squaref(float x, float scale) {
    const float square = x * x;
    const float e = expf(scale * square);
    return fmaf(e, scale * fmaf(x, x, -square), e);
}
