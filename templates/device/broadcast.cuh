// Where element `i` lies in each of the first kCount operands; returns how many elements its row,
// the innermost dimension, still has. Dense operands have one dimension and need no division. The
// loop is unrolled so that every size and stride is an immediate address; the outermost dimension
// needs no division either.
template <int kCount>
__device__ inline uint32_t locate(const Operands& ops, int64_t i, int64_t (&offset)[kCount]) {
    if (ops.dims <= 1) {
        for (int o = 0; o < kCount; ++o) offset[o] = i * ops.stride[o][0];
        return UINT32_MAX;
    }
    uint32_t rest = i, left = 0, at[kCount] = {};
#pragma unroll
    for (int d = 0; d < kOutermost; ++d) {
        const Divisor size = ops.size[d];
        const uint32_t above = (__umulhi(rest, size.magic) + rest) >> size.shift;
        const uint32_t index = rest - above * size.value;
        if (d == 0) left = size.value - index;
        for (int o = 0; o < kCount; ++o) at[o] += index * uint32_t(ops.stride[o][d]);
        rest = above;
        if (d + 2 == ops.dims) break;
    }
    for (int o = 0; o < kCount; ++o) offset[o] = at[o] + rest * uint32_t(ops.stride[o][kOutermost]);
    return left;
}

// A pack by one access where those of the operand are whole. Elsewhere its elements are `left` at
// most of the row that goes on at `offset`, and others of the row that begins at `next`.
template <typename T, int kVec>
__device__ inline Pack<T, kVec> load(const Operands& ops, int o, int64_t offset, uint32_t left,
                                     int64_t next) {
    if constexpr (kVec > 1) {
        if (!(ops.whole >> o & 1)) {
            const T* const data = static_cast<const T*>(ops.data[o]);
            const int64_t step = ops.stride[o][0];
            Pack<T, kVec> pack;
            if (step == 0 && left >= kVec) {
                for (T& element : pack.at) element = data[offset];
                return pack;
            }
            for (uint32_t v = 0; v < kVec; ++v) {
                pack.at[v] = data[v < left ? offset + v * step : next + (v - left) * step];
            }
            return pack;
        }
    }
    return pack_at<T, kVec>(ops.data[o], offset);
}

// Whether an operand's packs are whole: neighbours in memory that start on a pack's boundary. Where
// rows are not made up of packs, some lie across two, so that all rows have to follow each other.
inline bool has_whole_packs(const Operands& ops, int o, int vec) {
    const auto address = reinterpret_cast<uintptr_t>(ops.data[o]);
    if (ops.stride[o][0] != 1 || address % (vec * ops.bytes[o]) != 0) return false;
    const bool across = ops.dims > 1 && ops.size[0].value % vec != 0;
    int64_t dense = 1;
    for (int d = 1; d < ops.dims; ++d) {
        dense *= ops.size[d - 1].value;
        const int64_t stride = ops.stride[o][d + 1 == ops.dims ? kOutermost : d];
        if (across ? stride != dense : stride % vec != 0) return false;
    }
    return true;
}

// The same operands with those marked that the vector kernel moves by packs. It needs them of each
// result; an input may also have rows that are dense, or of one value. A single row may be ragged:
// its last elements go to the scalar kernel.
inline Operands with_packs(Operands ops, int outputs, int count, int vec) {
    if (ops.dims == 0 || (ops.dims > 1 && ops.size[0].value < uint32_t(vec))) return ops;
    uint64_t whole = 0;
    for (int o = 0; o < count; ++o) {
        if (has_whole_packs(ops, o, vec)) {
            whole |= uint64_t(1) << o;
        } else if (o < outputs || ops.stride[o][0] > 1) {
            return ops;
        }
    }
    ops.whole = whole;
    return ops;
}

inline bool allows_packs(const Operands& ops, int, int) { return ops.whole != 0; }
