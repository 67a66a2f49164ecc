// A long k in parts, whose sums go through memory.
inline int part_of(int k, int parts) { return ((k + parts - 1) / parts + 63) / 64 * 64; }

// In how many parts k is multiplied: the number for which the rounds of all multiprocessors are
// shortest. A round costs what `round` k more would, a part that its sums go through memory.
inline int parts_of(int64_t tiles, int k, int processors, int round = 256) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= 4 * processors && (parts == 1 || k / parts >= 512); ++parts) {
        const int part_k = (k + parts - 1) / parts;
        const int64_t rounds = (tiles * parts + processors - 1) / processors;
        const int64_t cost =
            rounds * (part_k + round) + (parts > 1 ? round + round / 8 * parts : 0);
        if (cost < least) best = parts, least = cost;
    }
    const int part_k = part_of(k, best);
    return (k + part_k - 1) / part_k;
}

// Adds up the parts of k, in their order.
template <int kVec, typename Epilogue>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const __grid_constant__ Epilogue epilogue, float* partial, int parts,
                     int64_t count) {
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kVec;
    if (i >= count) return;
    Pack<float, kVec> sum = {};
    for (int part = 0; part < parts; ++part) {
        const auto one = pack_at<float, kVec>(partial, part * count + i);
        for (int v = 0; v < kVec; ++v) sum.at[v] += one.at[v];
    }
    epilogue(i, sum);
}
