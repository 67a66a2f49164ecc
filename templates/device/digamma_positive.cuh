// The derivative of log(gamma(x)) for x > 0: up by psi(x) = psi(x + 1) - 1 / x to 6, where the
// asymptotic series is right to 2e-11 (Abramowitz and Stegun, 6.3.18).
template <typename Real>
__device__ inline Real digamma_positive(Real x) {
    Real rest = 0;
    for (; x < 6; x += 1) rest += 1 / x;
    const Real z = 1 / (x * x);
    Real p = Real(0.0075757575757575758);
    p = p * z - Real(0.0041666666666666667);
    p = p * z + Real(0.0039682539682539683);
    p = p * z - Real(0.0083333333333333333);
    p = p * z + Real(0.083333333333333333);
    return log(x) - (z * p + (Real(0.5) / x + rest));
}
