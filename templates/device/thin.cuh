// Products in which one side has few rows: a matrix times a vector, a linear layer for a small
// batch. What such a product takes is the time to read the other side, the large one. So that is
// read once, by packs, many of them under way, while the thin side comes from shared memory, where
// each block keeps a chunk of it.
//
// A thread adds up 4 or 8 products one after another. All that is added to those, by threads, lanes,
// warps and parts of k, in an order that is always the same, keeps what rounding takes from it.
constexpr int kThinThreads = 256;
constexpr int kThinVec = 4;
constexpr int kThinShared = 8192;  // floats: a chunk of the thin side, then sums
constexpr int kThinRows = 4;       // a thread, of a large side with neighbours in k
// Elements of the large side that a block takes at least where k is cut, and how many blocks a
// multiprocessor should have then, so that few of them wait for the last. With 128, [2048, 2^20] by a
// vector takes 2.19 ms, with 32 2.02, with 16 and kThinWide 1.92 (H200: 4.5 TB/s).
constexpr int kThinWork = 1 << 15, kThinBlocks = 16;
// From so many elements on, a block takes 32 rows: [32768, 32768] in 1.02 ms for 1.05, but
// [8192, 8192] in 0.075 for 0.072.
constexpr int64_t kThinWide = 1 << 28;

constexpr int kThinResident = 2;  // blocks that a multiprocessor has registers for

// A sum and the roundings of its additions (Knuth's TwoSum), so that it errs like one addition,
// however many there are.
struct ThinSum {
    float sum, lost;

    __device__ void add(float x) {
        const float next = sum + x, back = next - sum;
        lost += (sum - (next - back)) + (x - back);
        sum = next;
    }
    // With that of the lane `apart` from this one.
    __device__ void add_lane(int apart) {
        const float more = __shfl_xor_sync(~0u, lost, apart);
        add(__shfl_xor_sync(~0u, sum, apart));
        lost += more;
    }
    // What is infinite has lost NaN.
    __device__ float all() const { return isfinite(lost) ? sum + lost : sum; }
};

struct Thin {
    Side large, small;
    int batches, k, part_k, parts, lanes, tiles;
    int64_t row_step, small_step;  // between results of neighbouring rows
    float* partial;                // [result][part] where k is cut
    bool along, vector;            // how the large side is read
};

// What a block multiplies: rows from `row` on, and of the batch and the part the first elements.
struct ThinPlace {
    const float *large, *small;
    int row, k, part;
    int64_t result;
};

__device__ inline ThinPlace thin_place(const Thin& p, int rows) {
    const int tiles = p.tiles, tile = blockIdx.x % tiles;
    const int64_t index = blockIdx.x / tiles, batch = index % p.batches;
    const int part = index / p.batches;
    const int64_t k = int64_t(part) * p.part_k;
    const float* const large = static_cast<const float*>(p.large.data);
    const float* const small = static_cast<const float*>(p.small.data);
    return {large + batch * p.large.batch_stride + k * p.large.k_stride,
            small + batch * p.small.batch_stride + k * p.small.k_stride,
            tile * rows,
            int(min(int64_t(p.part_k), p.k - k)),
            part,
            batch * p.large.rows * p.small.rows};
}

// Brings a chunk of the thin side to shared memory; `place` says where row j has element k there.
template <int kSmall, typename Place>
__device__ inline void stage_thin(float* to, const Side& small, const float* from, int n,
                                  Place place) {
    const auto bring = [&](int j, int k) {
        const float* const at = from + j * small.row_stride + k * small.k_stride;
        to[place(j, k)] = j < small.rows ? *at : 0.0f;
    };
    // Neighbours in memory for neighbouring threads.
    if (small.k_stride == 1) {
#pragma unroll(8 / kSmall)
        for (int k = threadIdx.x; k < n; k += kThinThreads) {
#pragma unroll
            for (int j = 0; j < kSmall; ++j) bring(j, k);
        }
    } else {
#pragma unroll 8
        for (int e = threadIdx.x; e < kSmall * n; e += kThinThreads) bring(e % kSmall, e / kSmall);
    }
}

template <int kVec>
__device__ inline Pack<float, kVec> read_pack(const float* from) {
    return *reinterpret_cast<const Pack<float, kVec>*>(from);
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
template <int kSmall, int kVec, typename Epilogue>
__global__ void __launch_bounds__(kThinThreads, kThinResident)
    thin_along_kernel(const __grid_constant__ Thin p, const __grid_constant__ Epilogue epilogue) {
    constexpr int kChunk = kThinShared / kSmall, kUnroll = kVec == 1 ? 4 : 2;
    const auto place = [](int j, int k) { return j * kChunk + k; };
    __shared__ alignas(16) float shared[kThinShared];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
    const int rows = kThinThreads / p.lanes * kThinRows, step = p.lanes * kVec;
    const ThinPlace at = thin_place(p, rows);
    const float* line[kThinRows];  // behind the last row that one again, for sums that nobody reads
#pragma unroll
    for (int r = 0; r < kThinRows; ++r) {
        const int row = min(at.row + group * kThinRows + r, p.large.rows - 1);
        line[r] = at.large + row * p.large.row_stride;
    }
    ThinSum sum[kThinRows][kSmall] = {};
    for (int from = 0; from < at.k; from += kChunk) {
        const int n = min(kChunk, at.k - from);
        Pack<float, kVec> packs[kUnroll][kThinRows];
        const auto load = [&](int k) {
            if (k >= n) return;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int inside = from + min(k + u * step, n - kVec);
#pragma unroll
                for (int r = 0; r < kThinRows; ++r) {
                    packs[u][r] = read_pack<kVec>(line[r] + inside);
                }
            }
        };
        load(lane * kVec);  // on their way while the thin side comes
        if (from > 0) __syncthreads();
        stage_thin<kSmall>(shared, p.small, at.small + from * p.small.k_stride, n, place);
        __syncthreads();
        for (int k = lane * kVec; k < n; k += kUnroll * step) {
            float run[kThinRows][kSmall] = {};
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * step >= n) break;
#pragma unroll
                for (int j = 0; j < kSmall; ++j) {
                    const auto y = pack_at<float, kVec>(shared, place(j, k + u * step));
#pragma unroll
                    for (int e = 0; e < kThinRows * kVec; ++e) {
                        float& to = run[e % kThinRows][j];
                        to = fmaf(packs[u][e % kThinRows].at[e / kThinRows], y.at[e / kThinRows],
                                  to);
                    }
                }
            }
            load(k + kUnroll * step);
#pragma unroll
            for (int e = 0; e < kThinRows * kSmall; ++e) {
                sum[e / kSmall][e % kSmall].add(run[e / kSmall][e % kSmall]);
            }
        }
    }
    const int lanes = min(p.lanes, 32), warps = p.lanes / lanes;
    for (int apart = 1; apart < lanes; apart *= 2) {
#pragma unroll
        for (int e = 0; e < kThinRows * kSmall; ++e) {
            sum[e / kSmall][e % kSmall].add_lane(apart);
        }
    }
    __syncthreads();
    if (lane % lanes == 0) {
#pragma unroll
        for (int e = 0; e < kThinRows * kSmall; ++e) {
            shared[threadIdx.x / lanes * kThinRows * kSmall + e] =
                sum[e / kSmall][e % kSmall].all();
        }
    }
    __syncthreads();
    const bool turned = p.small_step == 1;  // which neighbouring threads write next to each other
    for (int e = threadIdx.x; e < rows * p.small.rows; e += kThinThreads) {
        const int r = turned ? e / p.small.rows : e % rows;
        const int j = turned ? e % p.small.rows : e / rows;
        if (at.row + r >= p.large.rows) continue;
        ThinSum all = {};
        for (int w = 0; w < warps; ++w) {
            const int of_warp = (r / kThinRows * warps + w) * kThinRows + r % kThinRows;
            all.add(shared[of_warp * kSmall + j]);
        }
        const int64_t i = at.result + (at.row + r) * p.row_step + j * p.small_step;
        put_thin(p, epilogue, i, at.part, all.all());
    }
}

// Where neighbours in memory are of one k and different rows: so many lanes take a pack of rows
// each, and every group of lanes takes other k.
template <int kSmall, int kVec, typename Epilogue>
__global__ void __launch_bounds__(kThinThreads, kThinResident)
    thin_across_kernel(const __grid_constant__ Thin p, const __grid_constant__ Epilogue epilogue) {
    constexpr int kChunk = kThinShared / kSmall, kUnroll = 8;
    const auto place = [](int j, int k) { return k * kSmall + j; };
    __shared__ alignas(16) float shared[kThinShared];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
    const int rows = p.lanes * kVec, groups = kThinThreads / p.lanes;
    const ThinPlace at = thin_place(p, rows);
    // Behind the last row the last pack again, for sums that nobody reads.
    const float* const column = at.large + min(at.row + lane * kVec, p.large.rows - kVec);
    ThinSum sum[kVec][kSmall] = {};
    for (int from = 0; from < at.k; from += kChunk) {
        const int n = min(kChunk, at.k - from);
        Pack<float, kVec> packs[kUnroll];
        const auto load = [&](int k) {
            if (k >= n) return;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int64_t inside = from + min(k + u * groups, n - 1);
                packs[u] = read_pack<kVec>(column + inside * p.large.k_stride);
            }
        };
        load(group);
        if (from > 0) __syncthreads();
        stage_thin<kSmall>(shared, p.small, at.small + from * p.small.k_stride, n, place);
        __syncthreads();
        for (int k = group; k < n; k += kUnroll * groups) {
            float run[kVec][kSmall] = {};
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * groups >= n) break;
                const auto y = pack_at<float, kSmall>(shared, place(0, k + u * groups));
#pragma unroll
                for (int e = 0; e < kVec * kSmall; ++e) {
                    float& to = run[e % kVec][e / kVec];
                    to = fmaf(packs[u].at[e % kVec], y.at[e / kVec], to);
                }
            }
            load(k + kUnroll * groups);
#pragma unroll
            for (int e = 0; e < kVec * kSmall; ++e) {
                sum[e % kVec][e / kVec].add(run[e % kVec][e / kVec]);
            }
        }
    }
    static_assert(kThinThreads * kVec * kSmall <= kThinShared, "");
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kSmall * kVec; ++e) {
        shared[(e / kVec * kThinThreads + threadIdx.x) * kVec + e % kVec] =
            sum[e % kVec][e / kVec].all();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.small.rows * rows; e += kThinThreads) {
        const int r = e % rows, j = e / rows;
        if (at.row + r >= p.large.rows) continue;
        ThinSum all = {};
        for (int g = 0; g < groups; ++g) {
            all.add(shared[(j * kThinThreads + g * p.lanes) * kVec + r]);
        }
        const int64_t i = at.result + (at.row + r) * p.row_step + j * p.small_step;
        put_thin(p, epilogue, i, at.part, all.all());
    }
}

// Adds up the parts of k of each result by so many threads.
template <typename Epilogue>
__global__ void __launch_bounds__(kThreads)
    add_thin_kernel(const __grid_constant__ Epilogue epilogue, const float* partial, int parts,
                    int adders, int64_t count) {
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / adders;
    const int first = threadIdx.x % adders;
    ThinSum sum = {};
    if (i < count) {
#pragma unroll 8
        for (int part = first; part < parts; part += adders) sum.add(partial[i * parts + part]);
    }
    for (int apart = 1; apart < adders; apart *= 2) sum.add_lane(apart);
    if (i < count && first == 0) epilogue(i, Pack<float, 1>{sum.all()});
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
    const int rows = p.large.rows;
    const int64_t stride = p.along ? p.large.row_stride : p.large.k_stride;
    p.vector = reinterpret_cast<uintptr_t>(p.large.data) % 16 == 0 && stride % kThinVec == 0 &&
               (p.along ? p.k : rows) % kThinVec == 0 &&
               (p.batches == 1 || p.large.batch_stride % kThinVec == 0);
    const int pack = p.vector ? kThinVec : 1;
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
    const int64_t blocks = int64_t(p.tiles) * p.batches;
    int64_t parts = 1;
    if (blocks < 2 * problem.processors) {
        const int64_t many = int64_t(kThinBlocks) * problem.processors / blocks;
        parts = max(parts, min(many, int64_t(p.k) * tile / kThinWork));
    }
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
template <int kSmall, typename Epilogue>
cudaError_t run_thin(const Epilogue& epilogue, const Problem& problem, cudaStream_t stream) {
    const Thin p = thin_of(problem);
    const auto kernel = p.along    ? p.vector ? thin_along_kernel<kSmall, kThinVec, Epilogue>
                                              : thin_along_kernel<kSmall, 1, Epilogue>
                        : p.vector ? thin_across_kernel<kSmall, kThinVec, Epilogue>
                                   : thin_across_kernel<kSmall, 1, Epilogue>;
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
