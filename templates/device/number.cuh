// A mask that takes part in arithmetic: bool, or a floating tensor that stands for it.
__device__ inline float number(bool v) { return v ? 1.0f : 0.0f; }
template <typename T>
__device__ inline float number(T v) {
    return to_float(v);
}
