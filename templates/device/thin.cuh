// Products in which one side has few rows: a matrix times a vector, a linear layer for a small
// batch. What such a product takes is the time to read the other side, the large one. So that is
// read once, by packs, many of them under way, while the thin side comes from shared memory, where
// each block keeps a chunk of it.
//
// A thread adds up kThinRun products one after another at most; then lanes, warps and parts of k are
// added up in pairs or in an order of their own, always the same.
constexpr int kThinThreads = 256;
constexpr int kThinShared = 8192;  // floats: a chunk of the thin side, then sums
constexpr int kThinRows = 4;       // a thread, of a large side with neighbours in k
constexpr int kThinRun = 1024;
// Elements of the large side that a block takes at least where k is cut, and how many blocks a
// multiprocessor should have then, so that few of them wait for the last. With 128, [2048, 2^20] by a
// vector takes 2.19 ms, with 32 2.02, with 16 and kThinWide 1.92 (H200: 4.5 TB/s).
constexpr int kThinWork = 1 << 15, kThinBlocks = 16;
// From so many elements on, a block takes 32 rows: [32768, 32768] in 1.02 ms for 1.05, but
// [8192, 8192] in 0.075 for 0.072.
constexpr int64_t kThinWide = 1 << 28;

// Blocks that a multiprocessor has registers for; of more, some would be in memory.
template <typename T, int kSmall>
constexpr int kThinResident = kSmall == 1 || (kSmall < 8 && sizeof(T) == 4) ? 2 : 1;

struct Thin {
    Side large, small;
    int batches, k, part_k, parts, lanes, tiles;
    int64_t row_step, small_step;  // between results of neighbouring rows
    float* partial;                // [result][part] where k is cut
    bool along, vector;            // how the large side is read
};

// What a block multiplies: rows from `row` on, and of the batch and the part the first elements.
template <typename T>
struct ThinPlace {
    const T *large, *small;
    int row, k, part;
    int64_t result;
};

template <typename T>
__device__ inline ThinPlace<T> thin_place(const Thin& p, int rows) {
    const int tiles = p.tiles, tile = blockIdx.x % tiles;
    const int64_t index = blockIdx.x / tiles, batch = index % p.batches;
    const int part = index / p.batches;
    const int64_t k = int64_t(part) * p.part_k;
    const T* const large = static_cast<const T*>(p.large.data);
    const T* const small = static_cast<const T*>(p.small.data);
    return {large + batch * p.large.batch_stride + k * p.large.k_stride,
            small + batch * p.small.batch_stride + k * p.small.k_stride,
            tile * rows,
            int(min(int64_t(p.part_k), p.k - k)),
            part,
            batch * p.large.rows * p.small.rows};
}

// Brings a chunk of the thin side to shared memory; `place` says where row j has element k there.
template <typename T, int kSmall, typename Place>
__device__ inline void stage_thin(float* to, const Side& small, const T* from, int n, Place place) {
    const auto bring = [&](int j, int k) {
        const T* const at = from + j * small.row_stride + k * small.k_stride;
        to[place(j, k)] = j < small.rows ? to_float(*at) : 0.0f;
    };
    // Neighbours in memory for neighbouring threads.
    if (small.k_stride == 1) {
#pragma unroll(kSmall < 8 ? 8 / kSmall : 1)
        for (int k = threadIdx.x; k < n; k += kThinThreads) {
#pragma unroll
            for (int j = 0; j < kSmall; ++j) bring(j, k);
        }
    } else {
#pragma unroll 8
        for (int e = threadIdx.x; e < kSmall * n; e += kThinThreads) bring(e % kSmall, e / kSmall);
    }
}

template <typename T, int kVec>
__device__ inline Pack<T, kVec> read_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, kVec>*>(from);
}

template <typename Epilogue>
__device__ inline void put_thin(const Thin& p, const Epilogue& epilogue, int64_t i, int part,
                                float sum) {
    if (p.partial) {
        p.partial[i * p.parts + part] = sum;
    } else {
        epilogue(i, Pack<float, 1>{sum});
    }
}

// Where neighbours in memory are of one row: so many lanes a row go along it, and take kThinRows
// rows at a time.
template <typename T, int kSmall, int kVec, typename Epilogue>
__global__ void __launch_bounds__(kThinThreads, kThinResident<T, kSmall>)
    thin_along_kernel(const __grid_constant__ Thin p, const __grid_constant__ Epilogue epilogue) {
    constexpr int kChunk = kThinShared / kSmall, kFour = kVec < 4 ? kVec : 4;
    constexpr int kUnroll = (kSmall * kVec <= 16 ? 2 : 1) * (kVec == 1 ? 2 : 1);
    // Fours of a pack lie apart, so that lanes read theirs next to each other.
    const auto place = [](int j, int k) {
        return j * kChunk + k % kVec / kFour * (kChunk / kVec * kFour) + k / kVec * kFour +
               k % kFour;
    };
    __shared__ alignas(16) float shared[kThinShared];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
    const int rows = kThinThreads / p.lanes * kThinRows, step = p.lanes * kVec;
    const ThinPlace<T> at = thin_place<T>(p, rows);
    const T* line[kThinRows];  // behind the last row that one again, for sums that nobody reads
#pragma unroll
    for (int r = 0; r < kThinRows; ++r) {
        const int row = min(at.row + group * kThinRows + r, p.large.rows - 1);
        line[r] = at.large + row * p.large.row_stride;
    }
    float sum[kThinRows][kSmall] = {};
    for (int from = 0; from < at.k; from += kChunk) {
        const int n = min(kChunk, at.k - from);
        Pack<T, kVec> packs[kUnroll][kThinRows];
        const auto load = [&](int k) {
            if (k >= n) return;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int inside = from + min(k + u * step, n - kVec);
#pragma unroll
                for (int r = 0; r < kThinRows; ++r) {
                    packs[u][r] = read_pack<T, kVec>(line[r] + inside);
                }
            }
        };
        load(lane * kVec);  // on their way while the thin side comes
        if (from > 0) __syncthreads();
        stage_thin<T, kSmall>(shared, p.small, at.small + from * p.small.k_stride, n, place);
        __syncthreads();
        for (int k = lane * kVec; k < n; k += kUnroll * step) {
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * step >= n) break;
#pragma unroll
                for (int four = 0; four < kVec; four += kFour) {
                    float x[kThinRows][kFour];
#pragma unroll
                    for (int e = 0; e < kThinRows * kFour; ++e) {
                        x[e / kFour][e % kFour] =
                            to_float(packs[u][e / kFour].at[four + e % kFour]);
                    }
#pragma unroll
                    for (int j = 0; j < kSmall; ++j) {
                        const auto y = pack_at<float, kFour>(shared, place(j, k + u * step + four));
#pragma unroll
                        for (int e = 0; e < kThinRows * kFour; ++e) {
                            float& to = sum[e % kThinRows][j];
                            to = fmaf(x[e % kThinRows][e / kThinRows], y.at[e / kThinRows], to);
                        }
                    }
                }
            }
            load(k + kUnroll * step);
        }
    }
    const int lanes = min(p.lanes, 32), warps = p.lanes / lanes;
    for (int apart = 1; apart < lanes; apart *= 2) {
#pragma unroll
        for (int e = 0; e < kThinRows * kSmall; ++e) {
            float& to = sum[e / kSmall][e % kSmall];
            to += __shfl_xor_sync(~0u, to, apart);
        }
    }
    __syncthreads();
    if (lane % lanes == 0) {
#pragma unroll
        for (int e = 0; e < kThinRows * kSmall; ++e) {
            shared[threadIdx.x / lanes * kThinRows * kSmall + e] = sum[e / kSmall][e % kSmall];
        }
    }
    __syncthreads();
    const bool turned = p.small_step == 1;  // which neighbouring threads write next to each other
    for (int e = threadIdx.x; e < rows * p.small.rows; e += kThinThreads) {
        const int r = turned ? e / p.small.rows : e % rows;
        const int j = turned ? e % p.small.rows : e / rows;
        if (at.row + r >= p.large.rows) continue;
        float all = 0.0f;
        for (int w = 0; w < warps; ++w) {
            const int of_warp = (r / kThinRows * warps + w) * kThinRows + r % kThinRows;
            all += shared[of_warp * kSmall + j];
        }
        const int64_t i = at.result + (at.row + r) * p.row_step + j * p.small_step;
        put_thin(p, epilogue, i, at.part, all);
    }
}

// Where neighbours in memory are of one k and different rows: so many lanes take a pack of rows
// each, and every group of lanes takes other k.
template <typename T, int kSmall, int kVec, typename Epilogue>
__global__ void __launch_bounds__(kThinThreads, kThinResident<T, kSmall>)
    thin_across_kernel(const __grid_constant__ Thin p, const __grid_constant__ Epilogue epilogue) {
    constexpr int kChunk = kThinShared / kSmall, kFour = kSmall < 4 ? kSmall : 4;
    constexpr int kUnroll = kSmall < 8 && kVec < 8 ? 8 : 4;
    const auto place = [](int j, int k) { return k * kSmall + j; };
    __shared__ alignas(16) float shared[kThinShared];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
    const int rows = p.lanes * kVec, groups = kThinThreads / p.lanes;
    const ThinPlace<T> at = thin_place<T>(p, rows);
    // Behind the last row the last pack again, for sums that nobody reads.
    const T* const column = at.large + min(at.row + lane * kVec, p.large.rows - kVec);
    float sum[kVec][kSmall] = {};
    for (int from = 0; from < at.k; from += kChunk) {
        const int n = min(kChunk, at.k - from);
        Pack<T, kVec> packs[kUnroll];
        const auto load = [&](int k) {
            if (k >= n) return;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int64_t inside = from + min(k + u * groups, n - 1);
                packs[u] = read_pack<T, kVec>(column + inside * p.large.k_stride);
            }
        };
        load(group);
        if (from > 0) __syncthreads();
        stage_thin<T, kSmall>(shared, p.small, at.small + from * p.small.k_stride, n, place);
        __syncthreads();
        for (int k = group; k < n; k += kUnroll * groups) {
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * groups >= n) break;
                float x[kVec];
#pragma unroll
                for (int v = 0; v < kVec; ++v) x[v] = to_float(packs[u].at[v]);
#pragma unroll
                for (int four = 0; four < kSmall; four += kFour) {
                    const auto y = pack_at<float, kFour>(shared, place(four, k + u * groups));
#pragma unroll
                    for (int e = 0; e < kFour * kVec; ++e) {
                        float& to = sum[e % kVec][four + e / kVec];
                        to = fmaf(x[e % kVec], y.at[e / kVec], to);
                    }
                }
            }
            load(k + kUnroll * groups);
        }
    }
    constexpr int kFit = kThinShared / (kThinThreads * kVec), kEach = kFit < kSmall ? kFit : kSmall;
#pragma unroll
    for (int first = 0; first < kSmall; first += kEach) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < kEach * kVec; ++e) {
            shared[(e / kVec * kThinThreads + threadIdx.x) * kVec + e % kVec] =
                sum[e % kVec][first + e / kVec];
        }
        __syncthreads();
        for (int e = threadIdx.x; e < kEach * rows; e += kThinThreads) {
            const int r = e % rows, j = first + e / rows;
            if (at.row + r >= p.large.rows || j >= p.small.rows) continue;
            float all = 0.0f;
            for (int g = 0; g < groups; ++g) {
                all += shared[(e / rows * kThinThreads + g * p.lanes) * kVec + r];
            }
            const int64_t i = at.result + (at.row + r) * p.row_step + j * p.small_step;
            put_thin(p, epilogue, i, at.part, all);
        }
    }
}

// Adds up the parts of k of each result by so many threads.
template <typename Epilogue>
__global__ void __launch_bounds__(kThreads)
    add_thin_kernel(const __grid_constant__ Epilogue epilogue, const float* partial, int parts,
                    int adders, int64_t count) {
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / adders;
    const int first = threadIdx.x % adders;
    float sum = 0.0f;
    if (i < count) {
#pragma unroll 8
        for (int part = first; part < parts; part += adders) sum += partial[i * parts + part];
    }
    for (int apart = 1; apart < adders; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (i < count && first == 0) epilogue(i, Pack<float, 1>{sum});
}

// A product by its sizes and by how its large side lies.
inline Thin thin_of(const Problem& problem) {
    Thin p = {};
    const bool large_is_a = problem.a.rows > problem.b.rows;
    p.large = large_is_a ? problem.a : problem.b;
    p.small = large_is_a ? problem.b : problem.a;
    p.row_step = large_is_a ? p.small.rows : 1;
    p.small_step = large_is_a ? 1 : p.large.rows;
    p.batches = problem.batches;
    p.k = problem.k;
    p.along = p.large.k_stride == 1;
    // Packs begin at a multiple of their size, in every row, and rows are made up of them.
    const int vec = 16 / problem.bytes, rows = p.large.rows;
    const int64_t stride = p.along ? p.large.row_stride : p.large.k_stride;
    p.vector = reinterpret_cast<uintptr_t>(p.large.data) % 16 == 0 && stride % vec == 0 &&
               (p.along ? p.k : rows) % vec == 0 &&
               (p.batches == 1 || p.large.batch_stride % vec == 0);
    const int pack = p.vector ? vec : 1;
    int tile = 0;
    if (p.along) {
        // A block has eight times the rows of the thin side, which so is read an eighth as much
        // again, or all that there are, and a lane two packs of a row.
        p.lanes = int64_t(rows) * p.k >= kThinWide ? 32 : kThinThreads * kThinRows / 8;
        const auto half_of = [&] { return kThinThreads / p.lanes * kThinRows / 2; };
        while (p.lanes > 4 && 2 * half_of() < 8 * p.small.rows) p.lanes /= 2;
        while (p.lanes < kThinThreads && half_of() >= rows) p.lanes *= 2;
        while (p.lanes > 4 && p.k < 2 * p.lanes * pack) p.lanes /= 2;
        tile = 2 * half_of();
    } else {
        p.lanes = 32;
        while (p.lanes > 4 && p.lanes / 2 * pack >= rows) p.lanes /= 2;
        tile = p.lanes * pack;
    }
    p.tiles = (rows + tile - 1) / tile;
    const int64_t run = int64_t(kThinRun) * (p.along ? p.lanes : kThinThreads / p.lanes);
    const int64_t blocks = int64_t(p.tiles) * p.batches, longest = (p.k + run - 1) / run;
    int64_t parts = longest;
    if (parts > 1 || blocks < 2 * problem.processors) {
        const int64_t many = int64_t(kThinBlocks) * problem.processors / blocks;
        parts = max(longest, min(many, int64_t(p.k) * tile / kThinWork));
    }
    parts = max(parts, int64_t(1));
    p.part_k = ((p.k + parts - 1) / parts + 63) / 64 * 64;
    p.parts = (p.k + p.part_k - 1) / p.part_k;
    p.partial = p.parts > 1 ? static_cast<float*>(problem.workspace) : nullptr;
    return p;
}

int64_t thin_workspace_bytes(const Problem& problem) {
    const Thin p = thin_of(problem);
    const int64_t count = int64_t(p.batches) * p.large.rows * p.small.rows;
    return p.parts > 1 ? count * p.parts * sizeof(float) : 0;
}

// `kSmall`, a power of two, is at least the rows of the thin side.
template <typename T, int kSmall, typename Epilogue>
cudaError_t run_thin(const Epilogue& epilogue, const Problem& problem, cudaStream_t stream) {
    const Thin p = thin_of(problem);
    constexpr int kVec = 16 / sizeof(T);
    const auto kernel = p.along    ? p.vector ? thin_along_kernel<T, kSmall, kVec, Epilogue>
                                              : thin_along_kernel<T, kSmall, 1, Epilogue>
                        : p.vector ? thin_across_kernel<T, kSmall, kVec, Epilogue>
                                   : thin_across_kernel<T, kSmall, 1, Epilogue>;
    const int64_t grid = int64_t(p.tiles) * p.batches * p.parts;
    kernel<<<grid, kThinThreads, 0, stream>>>(p, epilogue);
    if (p.partial) {
        const int64_t count = int64_t(p.batches) * p.large.rows * p.small.rows;
        int adders = 1;
        while (adders < 32 && 4 * adders < p.parts) adders *= 2;
        const auto add = add_thin_kernel<Epilogue>;
        const unsigned grid = blocks(count * adders);
        add<<<grid, kThreads, 0, stream>>>(epilogue, p.partial, p.parts, adders, count);
    }
    return cudaGetLastError();
}

int thin_processors() {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return processors;
}
