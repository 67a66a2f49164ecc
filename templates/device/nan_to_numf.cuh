// x with other numbers in place of NaN and the infinities.
__device__ inline float nan_to_numf(float x, float nan, float high, float low) {
    return x != x ? nan : x == INFINITY ? high : x == -INFINITY ? low : x;
}
