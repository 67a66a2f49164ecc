// Where element `i` lies in each of the first kCount operands. Dense operands have one dimension
// and need no division. The loop is unrolled so that every size and stride is an immediate address;
// the outermost dimension needs no division either.
template <int kCount>
__device__ inline void locate(const Operands& ops, int64_t i, int64_t (&offset)[kCount]) {
    if (ops.dims <= 1) {
        for (int o = 0; o < kCount; ++o) offset[o] = i * ops.stride[o][0];
        return;
    }
    uint32_t rest = i, at[kCount] = {};
#pragma unroll
    for (int d = 0; d < kOutermost; ++d) {
        const Divisor size = ops.size[d];
        const uint32_t above = (__umulhi(rest, size.magic) + rest) >> size.shift;
        const uint32_t index = rest - above * size.value;
        for (int o = 0; o < kCount; ++o) at[o] += index * uint32_t(ops.stride[o][d]);
        rest = above;
        if (d + 2 == ops.dims) break;
    }
    for (int o = 0; o < kCount; ++o) offset[o] = at[o] + rest * uint32_t(ops.stride[o][kOutermost]);
}

// An operand that does not move along the innermost dimension fills the pack with its one value.
template <typename T, int kVec>
__device__ inline Pack<T, kVec> load(const Operands& ops, int o, int64_t offset) {
    if constexpr (kVec > 1) {
        if (ops.stride[o][0] == 0) {
            Pack<T, kVec> pack;
            for (T& element : pack.at) element = static_cast<const T*>(ops.data[o])[offset];
            return pack;
        }
    }
    return pack_at<T, kVec>(ops.data[o], offset);
}

// Packs are right when each operand moves by one element along the innermost dimension, or not at
// all, and every row starts on a pack's boundary and holds whole packs. A single row may be ragged:
// its last elements go to the scalar kernel.
inline bool allows_packs(const Operands& ops, int count, int vec) {
    if (ops.dims == 0 || (ops.dims > 1 && ops.size[0].value % vec != 0)) return false;
    for (int o = 0; o < count; ++o) {
        if (ops.stride[o][0] == 0) continue;
        const auto address = reinterpret_cast<uintptr_t>(ops.data[o]);
        if (ops.stride[o][0] != 1 || address % (vec * ops.bytes[o]) != 0) return false;
        for (int d = 1; d < kMaxDims; ++d) {
            if (ops.stride[o][d] % vec != 0) return false;
        }
    }
    return true;
}
