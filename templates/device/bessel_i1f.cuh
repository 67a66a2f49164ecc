// The modified Bessel function I1, times exp(-|x|) where `scaled`: a least-maximum fit of I1(x) / x
// in x^2 to 1e-9 and from 6 on, of sqrt(|x|) exp(-|x|) I1(x), one in 1 / |x| to 9e-9.
__device__ inline float bessel_i1f(float x, bool scaled) {
    const float size = fabsf(x);
    float result;
    if (size < 6.0f) {
        const float z = x * x;
        float p = 7.73130117e-16f;
        p = fmaf(p, z, 1.34681044e-13f);
        p = fmaf(p, z, 3.41209561e-11f);
        p = fmaf(p, z, 5.64320146e-09f);
        p = fmaf(p, z, 6.7824385e-07f);
        p = fmaf(p, z, 5.42531343e-05f);
        p = fmaf(p, z, 0.00260416721f);
        p = fmaf(p, z, 0.0625f);
        p = fmaf(p, z, 0.5f);
        result = scaled ? size * p * expf(-size) : size * p;
    } else {
        const float w = 1.0f / size;
        float p = 384.751404f;
        p = fmaf(p, w, -245.831802f);
        p = fmaf(p, w, 61.8578224f);
        p = fmaf(p, w, -8.36406898f);
        p = fmaf(p, w, 0.558731377f);
        p = fmaf(p, w, -0.0664750412f);
        p = fmaf(p, w, -0.0462082736f);
        p = fmaf(p, w, -0.14960821f);
        p = fmaf(p, w, 0.398942292f);
        p *= sqrtf(w);
        result = scaled ? p : p * expf(size);
    }
    return x < 0.0f ? -result : result;
}
