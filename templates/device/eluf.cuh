// A zero keeps its sign through the linear branch.
__device__ inline float eluf(float x, float alpha, float scale) {
    return x >= 0.0f ? x * scale : expm1_negativef(x) * (alpha * scale);
}
