// For operands whose elements are moved along some dimensions. Those have stride 0 in Operands, and
// a thread finds the element's place along each by the rule below, from the coordinate of the
// result. Coordinates are operands without memory: the address that one would be read at is it. In
// 32 bits, as 64 would double the instructions, of which these kernels have many.

// Where the elements of a pack are along a dimension; see `load`.
struct Along {
    int first, next, step;
    uint32_t left;
    __device__ int at(uint32_t v) const {
        return v < left ? first + int(v) * step : next + int(v - left) * step;
    }
};

__device__ inline Along along(const Operands& ops, int o, int64_t offset, uint32_t left,
                              int64_t next) {
    const int base = int(reinterpret_cast<intptr_t>(ops.data[o]));
    return {base + int(offset), base + int(next), int(ops.stride[o][0]), left};
}

__device__ inline int64_t flipped(int i, Map map) { return (map.size - 1 - i) * map.stride; }

// PyTorch's roll by a shift that the host has brought into [0, size).
__device__ inline int64_t rolled(int i, Map map) {
    return (i < map.first ? i - map.first + map.size : i - map.first) * map.stride;
}

// Padded by `first` elements: by those next to the edge mirrored, by the edge, by the other end.
__device__ inline int64_t reflected(int i, Map map) {
    const int from = i < map.first ? map.first - i : i - map.first;
    return (from < map.size ? from : 2 * (map.size - 1) - from) * map.stride;
}

__device__ inline int64_t clamped(int i, Map map) {
    const int from = i < map.first ? 0 : i - map.first;
    return (from < map.size ? from : map.size - 1) * map.stride;
}

__device__ inline int64_t wrapped(int i, Map map) {
    const int from = i < map.first ? i - map.first + map.size : i - map.first;
    return (from < map.size ? from : from - map.size) * map.stride;
}

// Padded by a value, for which the element that is read here does not matter.
__device__ inline int64_t padding(int i, Map map) { return clamped(i, map); }

__device__ inline bool is_inside(int i, Map map) {
    return uint32_t(i - map.first) < uint32_t(map.size);
}

// A pack whose element `v` lies `moved(v)` behind its place in the operand; by one access where all
// lie behind the first.
template <typename T, int kVec, typename Moved>
__device__ inline Pack<T, kVec> load_moved(const Operands& ops, int o, int64_t offset,
                                           uint32_t left, int64_t next, Moved moved) {
    if constexpr (kVec > 1) {
        if (ops.whole >> o & 1) {
            const int64_t from = offset + moved(0);
            if (from % kVec == 0) return pack_at<T, kVec>(ops.data[o], from);
        }
    }
    const T* const data = static_cast<const T*>(ops.data[o]);
    const int64_t step = ops.stride[o][0];
    Pack<T, kVec> pack;
    // The same for all threads: where packs lie across two rows, each warp has some of them.
    if (ops.dims <= 1 || ops.size[0].value % kVec == 0) {
        for (uint32_t v = 0; v < kVec; ++v) pack.at[v] = data[offset + v * step + moved(v)];
        return pack;
    }
    for (uint32_t v = 0; v < kVec; ++v) {
        const int64_t place = v < left ? offset + v * step : next + (v - left) * step;
        pack.at[v] = data[place + moved(v)];
    }
    return pack;
}
