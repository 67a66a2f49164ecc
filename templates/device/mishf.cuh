// x tanh(log(1 + e)) with e = exp(x), where tanh(log(1 + e)) = n / (n + 2) and n = e (e + 2):
// one exponential and one reciprocal. Past 20 the factor is 1 in float32.
__device__ inline float mishf(float x) {
    const float e = expf(minimumf(x, 20.0f));
    const float n = e * (e + 2.0f);
    return x > 20.0f ? x : x * (n * reciprocalf(n + 2.0f));
}
