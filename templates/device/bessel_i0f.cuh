// The modified Bessel function I0, times exp(-|x|) where `scaled`: a least-maximum fit in x^2 to
// 3e-9 and from 6 on, of sqrt(|x|) exp(-|x|) I0(x), one in 1 / |x| to 1.1e-8.
__device__ inline float bessel_i0f(float x, bool scaled) {
    x = fabsf(x);
    if (x < 6.0f) {
        const float z = x * x;
        float p = 1.45285378e-14f;
        p = fmaf(p, z, 2.08260514e-12f);
        p = fmaf(p, z, 4.81065965e-10f);
        p = fmaf(p, z, 6.76393554e-08f);
        p = fmaf(p, z, 6.78341803e-06f);
        p = fmaf(p, z, 0.000434018904f);
        p = fmaf(p, z, 0.0156250205f);
        p = fmaf(p, z, 0.249999985f);
        p = fmaf(p, z, 1.0f);
        return scaled ? p * expf(-x) : p;
    }
    const float w = 1.0f / x;
    float p = -19.2177849f;
    p = fmaf(p, w, 12.3299379f);
    p = fmaf(p, w, -2.55423832f);
    p = fmaf(p, w, 0.324339837f);
    p = fmaf(p, w, 0.0140561536f);
    p = fmaf(p, w, 0.0284512099f);
    p = fmaf(p, w, 0.0498634912f);
    p = fmaf(p, w, 0.398942292f);
    p *= sqrtf(w);
    return scaled ? p : p * expf(x);
}
