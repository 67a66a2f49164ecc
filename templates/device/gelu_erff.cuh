// x times the normal distribution function. Within 0.8 that is 1/2 + x R(x^2), a least-maximum fit
// to 2.3e-9; the other form's rounding would show where results are small and many are averaged.
// Beyond it is half of erfc(|x| / sqrt 2) below 0 and its complement above. erfc(u) =
// 2 t P(t) exp(-u^2), t = 1 / (1 + 0.38 u): P is a least-maximum fit to (1 + 2 u^2) 6e-9, as the
// exponential's own error grows, for u up to 9.5. 1 + erf(x), the usual form, loses every digit
// below -5.
__device__ inline float gelu_erff(float x) {
    const float size = fabsf(x), z = x * x;
    float r = 9.95901937e-05f;
    r = fmaf(r, z, -0.00117704121f);
    r = fmaf(r, z, 0.00997055322f);
    r = fmaf(r, z, -0.0664900094f);
    r = fmaf(r, z, 0.398942262f);
    const float t = reciprocalf(fmaf(size, 0.26870057f, 1.0f));
    float p = -0.0682823211f;
    p = fmaf(p, t, 0.186229438f);
    p = fmaf(p, t, -0.0588148572f);
    p = fmaf(p, t, 0.139889494f);
    p = fmaf(p, t, 0.0845586359f);
    p = fmaf(p, t, 0.109333828f);
    p = fmaf(p, t, 0.107068479f);
    const float tail = p * t * power_of_twof(z * -0.72134752f);
    const float beyond = x < 0.0f ? tail : 1.0f - tail;
    return x * (size < 0.8f ? fmaf(x, r, 0.5f) : beyond);
}
