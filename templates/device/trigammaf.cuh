// The second derivative of log(gamma(x)): up by psi'(x) = psi'(x + 1) + 1 / x^2 to 6, where the
// asymptotic series is right to 1e-10 (Abramowitz and Stegun, 6.4.12); below 1/2 by reflection.
__device__ inline float trigammaf(float x) {
    float sign = 1.0f, result = 0.0f;
    if (x < 0.5f) {
        const float s = sinpif(x);
        sign = -1.0f;
        result = -9.86960411f / (s * s);
        x = 1.0f - x;
    }
    for (; x < 6.0f; x += 1.0f) result += 1.0f / (x * x);
    const float w = 1.0f / x, z = w * w;
    float p = -0.0333333333f;
    p = fmaf(p, z, 0.0238095238f);
    p = fmaf(p, z, -0.0333333333f);
    p = fmaf(p, z, 0.166666667f);
    return sign * (result + (w + fmaf(p * w, z, 0.5f * z)));
}
