// Float32 operands of a product as pairs of float16, which tensor cores multiply. Each row is scaled
// by the power of two that brings its largest magnitude to [2^14, 2^15); hi is the half nearest to
// that, lo the half nearest to what is left. hi + lo has the 24 bits of a float32 less one or two as
// far down as 2^-16 of the row's largest.
//
// A piece of 128 bytes has the hi and then the lo of 32 neighbours in k. Rows are padded with zeros
// to an even number of pieces. A long k may be cut into parts, each a row of its own.
constexpr int kPiece = 32;
constexpr int kLines = 8;  // 16-byte lines of a piece
constexpr int kSplitThreads = 256;

// Below this, a scaled element has fewer bits than float32; see `held`.
constexpr float kFull = 0.5f;

// One operand: [batch][row][k] in memory, what is made of it in [part][batch][row].
struct Factor {
    const float* data;
    int64_t batch_stride, row_stride, k_stride;
    int batches, rows, k, parts, part_k, pieces;
    uint4* pairs;
    float* inverse;  // what undoes a row's scale, NaN where pairs do not hold the row
};

// Where a row of a part lies.
struct Strip {
    const float* data;
    int k;
};

__device__ inline Strip strip_of(const Factor& f, int64_t line) {
    const int64_t row = line % f.rows, rest = line / f.rows;
    const int64_t batch = rest % f.batches, part = rest / f.batches;
    const int64_t first = part * f.part_k;
    const float* const data = f.data + batch * f.batch_stride + row * f.row_stride;
    return {data + first * f.k_stride, int(min(int64_t(f.part_k), f.k - first))};
}

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The power of two that brings a row with this largest magnitude to halves. 0 for infinities, NaN
// and rows so large or small that two scales together could overflow.
__device__ inline float scale_of(uint32_t largest) {
    if (largest == 0) return 1.0f;
    const int exponent = largest >> 23;  // biased
    return exponent < 79 || exponent > 203 ? 0.0f : __uint_as_float((268 - exponent) << 23);
}

__device__ inline int allowed(int k) { return max(4, k / 256); }

// Whether pairs hold a row of `k` elements at the accuracy of float32: `poor` of them are small and
// not 0. A few do not count: beside the others of their row they are nothing.
__device__ inline bool held(float scale, int poor, int k) {
    return scale > 0.0f && poor <= allowed(k);
}

struct Pairs {
    uint4 hi, lo;
};

__device__ inline Pairs pairs_of(const float (&x)[8], float scale, int& poor) {
    Pairs made;
    __half2* const hi = reinterpret_cast<__half2*>(&made.hi);
    __half2* const lo = reinterpret_cast<__half2*>(&made.lo);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 v = {x[2 * e] * scale, x[2 * e + 1] * scale};
        hi[e] = __float22half2_rn(v);
        const float2 near = __half22float2(hi[e]);
        lo[e] = __floats2half2_rn(v.x - near.x, v.y - near.y);
        poor += fabsf(v.x) < kFull && x[2 * e] != 0.0f;
        poor += fabsf(v.y) < kFull && x[2 * e + 1] != 0.0f;
    }
    return made;
}

// 8 elements from `at` on of a row whose elements are neighbours, 0 behind its end.
template <bool kVector>
__device__ inline void load_row(const Strip& row, int64_t stride, int at, float (&x)[8]) {
    if (kVector && at + 8 <= row.k) {
        *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(row.data + at);
        *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(row.data + at + 4);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = at + e < row.k ? row.data[(at + e) * stride] : 0.0f;
}

// Over the kLanes neighbouring threads of a row.
template <int kLanes>
__device__ inline uint32_t largest_of(uint32_t x) {
    for (int apart = 1; apart < min(kLanes, 32); apart *= 2) {
        x = max(x, __shfl_xor_sync(~0u, x, apart));
    }
    if (kLanes <= 32) return x;
    __shared__ uint32_t of_warp[kSplitThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    for (const uint32_t other : of_warp) x = max(x, other);
    return x;
}

template <int kLanes>
__device__ inline int sum_of(int x) {
    for (int apart = 1; apart < min(kLanes, 32); apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
    if (kLanes <= 32) return x;
    __shared__ int of_warp[kSplitThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (const int other : of_warp) x += other;
    return x;
}

// So many threads a row, which they keep in registers where it has kKeep packs of 8 a thread at
// most, all of a block or as many as share a warp.
template <bool kVector, int kKeep, int kLanes>
__global__ void __launch_bounds__(kSplitThreads) split_rows_kernel(const Factor f, int64_t lines) {
    const int64_t line = (int64_t(blockIdx.x) * kSplitThreads + threadIdx.x) / kLanes;
    const bool is_row = line < lines;
    const Strip row = strip_of(f, is_row ? line : 0);
    const int first = threadIdx.x % kLanes * 8, step = kLanes * 8;
    uint32_t largest = 0;
    float kept[kKeep ? kKeep : 1][8];
    if (kKeep) {
#pragma unroll
        for (int n = 0; n < kKeep; ++n) {
            load_row<kVector>(row, f.k_stride, first + n * step, kept[n]);
        }
#pragma unroll
        for (int n = 0; n < kKeep; ++n) {
            for (const float x : kept[n]) largest = max(largest, magnitude(x));
        }
    } else {
        for (int at = first; at < row.k; at += step) {
            load_row<kVector>(row, f.k_stride, at, kept[0]);
            for (const float x : kept[0]) largest = max(largest, magnitude(x));
        }
    }
    const float scale = scale_of(largest_of<kLanes>(largest));
    int poor = 0;
    uint4* const out = f.pairs + line * f.pieces * kLines;
#pragma unroll(kKeep ? kKeep : 1)
    for (int n = 0; kKeep == 0 || n < kKeep; ++n) {
        const int at = first + n * step;
        if (at >= f.pieces * kPiece || !is_row) break;
        if (!kKeep) load_row<kVector>(row, f.k_stride, at, kept[0]);
        const Pairs made = pairs_of(kept[kKeep ? n : 0], scale, poor);
        uint4* const pair = out + at / kPiece * kLines + at % kPiece / 8;
        pair[0] = made.hi;
        pair[kLines / 2] = made.lo;
    }
    poor = sum_of<kLanes>(poor);
    if (first == 0 && is_row) f.inverse[line] = held(scale, poor, row.k) ? 1.0f / scale : NAN;
}

// Where neighbours in memory are of one k and different rows, a cluster of blocks takes 32 rows, each
// block a share of k, and they tell each other the largest magnitudes. A warp has kKeep tiles of
// 32 x 32 in registers and reads again what it has more; it turns them in shared memory. Read once,
// that is 4096 x 4096 in 0.036 ms (H200); read twice by single blocks it was 0.071.
constexpr int kTurn = 32;
constexpr int kTurnThreads = 256;
constexpr int kMaxCluster = 8;

#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// What another block of the cluster has at the place of `mine`.
__device__ inline uint32_t of_block(const uint32_t* mine, int block) {
    uint32_t value;
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [at];\n}\n"
        : "=r"(value)
        : "r"(uint32_t(__cvta_generic_to_shared(mine))), "r"(block)
        : "memory");
    return value;
}
#endif

// Four rows at one k, 0 where there is none.
template <bool kVector>
__device__ inline float4 load_column(const float* at, int rows) {
    if (kVector && rows >= 4) return *reinterpret_cast<const float4*>(at);
    return {rows > 0 ? at[0] : 0.0f, rows > 1 ? at[1] : 0.0f, rows > 2 ? at[2] : 0.0f,
            rows > 3 ? at[3] : 0.0f};
}

template <bool kVector, int kKeep>
__global__ void __launch_bounds__(kTurnThreads) split_columns_kernel(const Factor f, int cluster) {
#if __CUDA_ARCH__ >= 900
    constexpr int kTurnWarps = kTurnThreads / 32;
    __shared__ uint32_t largest[kTurn], poor[kTurn];
    __shared__ float turned[kTurnWarps][kTurn][kTurn + 1];
    const int groups = (f.rows + kTurn - 1) / kTurn;
    const int64_t index = blockIdx.x / cluster, part = index / groups;  // and batch
    const int block = blockIdx.x % cluster, group = index % groups * kTurn;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = lane % 8 * 4, rows = min(kTurn, f.rows - group);
    const Strip strip = strip_of(f, part * f.rows + group);
    const int first = block * kTurnWarps + warp, step = cluster * kTurnWarps;  // in pieces
    const auto load = [&](int piece, float4(&x)[8]) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int k = piece * kPiece + n * 4 + lane / 8;
            const float* const at = strip.data + k * f.k_stride + column;
            x[n] = load_column<kVector>(at, k < strip.k ? rows - column : 0);
        }
    };
    if (threadIdx.x < kTurn) largest[threadIdx.x] = poor[threadIdx.x] = 0;
    __syncthreads();
    float4 kept[kKeep][8];
    uint32_t most[4] = {};
    const auto look = [&](const float4(&x)[8]) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            most[0] = max(most[0], magnitude(x[n].x));
            most[1] = max(most[1], magnitude(x[n].y));
            most[2] = max(most[2], magnitude(x[n].z));
            most[3] = max(most[3], magnitude(x[n].w));
        }
    };
#pragma unroll
    for (int n = 0; n < kKeep; ++n) load(first + n * step, kept[n]);
    for (int piece = first + kKeep * step; piece < f.pieces; piece += step) {
        float4 x[8];
        load(piece, x);
        look(x);
    }
#pragma unroll
    for (int n = 0; n < kKeep; ++n) look(kept[n]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        for (int apart = 8; apart < 32; apart *= 2) {
            most[c] = max(most[c], __shfl_xor_sync(~0u, most[c], apart));
        }
        if (lane < 8) atomicMax(&largest[column + c], most[c]);
    }
    cluster_sync();
    uint32_t whole = 0;  // of the row of this lane
    for (int b = 0; b < cluster; ++b) whole = max(whole, of_block(&largest[lane], b));
    const float scale = scale_of(whole);
    uint4* const out = f.pairs + (part * f.rows + group) * f.pieces * kLines;
    const auto turn = [&](int piece, const float4(&x)[8]) {
        float (&to)[kTurn][kTurn + 1] = turned[warp];
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float* const four = &to[n * 4 + lane / 8][column];
            four[0] = x[n].x, four[1] = x[n].y, four[2] = x[n].z, four[3] = x[n].w;
        }
        __syncwarp();
        // Four lanes a row, each with 8 neighbours in k.
#pragma unroll
        for (int n = 0; n < kTurn / 8; ++n) {
            const int row = n * 8 + lane / 4, eighth = lane % 4;
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = to[eighth * 8 + e][row];
            int count = 0;
            const Pairs made = pairs_of(v, __shfl_sync(~0u, scale, row), count);
            if (count) atomicAdd(&poor[row], count);
            if (row < rows) {
                uint4* const line = out + (int64_t(row) * f.pieces + piece) * kLines + eighth;
                line[0] = made.hi;
                line[kLines / 2] = made.lo;
            }
        }
    };
#pragma unroll
    for (int n = 0; n < kKeep; ++n) {
        if (first + n * step < f.pieces) turn(first + n * step, kept[n]);
    }
    for (int piece = first + kKeep * step; piece < f.pieces; piece += step) {
        float4 x[8];
        load(piece, x);
        turn(piece, x);
    }
    cluster_sync();
    if (block == 0 && warp == 0) {
        int count = 0;
        for (int b = 0; b < cluster; ++b) count += of_block(&poor[lane], b);
        const bool well = held(scale, count, strip.k);
        if (lane < rows) f.inverse[part * f.rows + group + lane] = well ? 1.0f / scale : NAN;
    }
    cluster_sync();  // what others read stays until they have
#endif
}

// 256 k a block and more.
inline cudaError_t split_columns(const Factor& f, int64_t parts, bool vector, cudaStream_t stream) {
    int cluster = 1;
    while (cluster < kMaxCluster && cluster * kTurnThreads < f.pieces * kPiece) cluster *= 2;
    const bool few = f.pieces * kPiece <= 2 * cluster * kTurnThreads;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim.x = parts * ((f.rows + kTurn - 1) / kTurn) * cluster;
    config.blockDim.x = kTurnThreads;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const auto kernel = !vector ? split_columns_kernel<false, 1>
                        : few   ? split_columns_kernel<true, 2>
                                : split_columns_kernel<true, 4>;
    return cudaLaunchKernelEx(&config, kernel, f, cluster);
}

inline void split_rows(const Factor& f, int64_t lines, bool vector, cudaStream_t stream) {
    const int k = f.pieces * kPiece;
    const int lanes = k <= 256 ? 8 : k <= 1024 ? 32 : 256;
    const auto kernel = !vector         ? split_rows_kernel<false, 0, 256>
                        : lanes == 8    ? split_rows_kernel<true, 4, 8>
                        : lanes == 32   ? split_rows_kernel<true, 4, 32>
                        : k <= 8 << 10  ? split_rows_kernel<true, 4, 256>
                        : k <= 16 << 10 ? split_rows_kernel<true, 8, 256>
                                        : split_rows_kernel<true, 0, 256>;
    const int rows = kSplitThreads / (vector ? lanes : 256);  // of a block
    kernel<<<(lines + rows - 1) / rows, kSplitThreads, 0, stream>>>(f, lines);
}

inline cudaError_t split(const Factor& f, cudaStream_t stream) {
    const int64_t parts = int64_t(f.parts) * f.batches;
    const bool columns = f.k_stride != 1 && f.row_stride == 1;
    const int64_t across = columns ? f.k_stride : f.row_stride;
    const bool vector = reinterpret_cast<uintptr_t>(f.data) % 16 == 0 && across % 4 == 0 &&
                        f.batch_stride % 4 == 0 && (columns || f.k_stride == 1);
    if (columns) return split_columns(f, parts, vector, stream);
    split_rows(f, parts * f.rows, vector, stream);
    return cudaGetLastError();
}
