// x times the normal distribution function, which is half of erfc(|x| / sqrt 2) below 0 and its
// complement above. erfc(u) = t P(t) exp(-u^2), t = 1 / (1 + 0.4167 u): P is a least-maximum fit to
// (1 + 2 u^2) 1.1e-8, as the exponential's own error grows, for u up to 9.5. 1 + erf(x), the usual
// form, loses every digit below -5.
__device__ inline float gelu_erff(float x) {
    const float t = reciprocalf(fmaf(fabsf(x), 0.294651396f, 1.0f));
    float p = 0.0370748199f;
    p = fmaf(p, t, -0.172417681f);
    p = fmaf(p, t, 0.248841765f);
    p = fmaf(p, t, -0.0907598074f);
    p = fmaf(p, t, 0.147582186f);
    p = fmaf(p, t, 0.0927805459f);
    p = fmaf(p, t, 0.119452971f);
    p = fmaf(p, t, 0.117445205f);
    const float tail = p * t * power_of_twof(x * x * -0.72134752f);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}
