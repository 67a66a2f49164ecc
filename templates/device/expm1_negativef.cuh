// exp(x) - 1 for x <= 0, without the branches of expm1f: x = k ln 2 + f, and (exp(f) - 1) 2^k is
// added to 2^k - 1, so no digit is lost near 0. 12582912 = 1.5 * 2^23 rounds to an integer and
// leaves it in the low bits; the polynomial is a least-maximum fit to 1.3e-8.
__device__ inline float expm1_negativef(float x) {
    x = maximumf(x, -30.0f);
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f);
    const float power = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    const float k = shifted - 12582912.0f;
    const float f = fmaf(k, -1.42860677e-6f, fmaf(k, -0.693145752f, x));
    float p = 0.00138825165f;
    p = fmaf(p, f, 0.00836654713f);
    p = fmaf(p, f, 0.0416672007f);
    p = fmaf(p, f, 0.166665434f);
    p = fmaf(p, f, 0.499999981f);
    p = fmaf(p * f, f, f);
    return fmaf(p, power, power - 1.0f);
}
