// Where element `i` lies in each operand. A dense tensor has one dimension and needs no division.
template <int kCount>
__device__ inline void locate(const Operands& ops, int64_t i, int64_t (&offset)[kCount]) {
    for (int o = 0; o < kCount; ++o) offset[o] = ops.dims <= 1 ? i * ops.stride[o][0] : 0;
    if (ops.dims <= 1) return;
#pragma unroll 1
    for (int d = 0; d < ops.dims; ++d) {
        const int64_t above = i / ops.size[d];
        const int64_t index = i - above * ops.size[d];
        for (int o = 0; o < kCount; ++o) offset[o] += index * ops.stride[o][d];
        i = above;
    }
}

template <typename T, int kVec>
__device__ inline Pack<T, kVec> load(const Operands& ops, int o, int64_t offset) {
    return pack_at<T, kVec>(ops.data[o], offset);
}

// Packs are right for operands that are dense and start on a pack's boundary.
inline bool allows_packs(const Operands& ops, int count, int vec) {
    if (ops.dims != 1) return false;
    for (int o = 0; o < count; ++o) {
        const auto address = reinterpret_cast<uintptr_t>(ops.data[o]);
        if (ops.stride[o][0] != 1 || address % (vec * ops.bytes[o]) != 0) return false;
    }
    return true;
}
