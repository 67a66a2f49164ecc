// The logit of x kept eps away from 0 and 1; a negative eps keeps nothing away.
__device__ inline float logit_clampedf(float x, float eps) {
    const float high = 1.0f - eps;
    const float inside = x < eps ? eps : x > high ? high : x;
    return logitf(eps < 0.0f ? x : inside);
}
