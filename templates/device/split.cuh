// Float32 operands of a product as pairs of float16, which tensor cores multiply. Each row is scaled
// by the power of two that brings its largest magnitude to [2^14, 2^15); hi is the half nearest to
// that, lo the half nearest to what is left. hi + lo has the 24 bits of a float32 less one or two as
// far down as 2^-16 of the row's largest, and errs by 2^-25, scaled, below.
//
// That counts where what is large in a row meets what is small in a column: with a[k] times 2^e[k]
// and b[k] over 2^e[k] all of it does. A row with a few tiny elements at most is multiplied well by
// any column. One with more is where it has kMargin times as many large elements as the column has
// small ones, tiny or 0: then large ones meet others that are not small, and beside them what is lost
// of the tiny ones is below float32's own rounding. So an activation's long tail toward 0 costs
// nothing beside ordinary weights, and a single spike is not trusted to meet one.
//
// A piece of 128 bytes has the hi and then the lo of 32 neighbours in k. Rows are padded with zeros
// to an even number of pieces. A long k may be cut into parts, each a row of its own.
constexpr int kPiece = 32;
constexpr int kLines = 8;  // 16-byte lines of a piece
constexpr int kSplitThreads = 256;

// Of scaled elements. Columns of 2^+-10 and the opposite have the error of float32, 2^+-12 nine times
// that; with kMargin they are told apart.
constexpr float kTiny = 0.125f, kLarge = 16.0f;
constexpr int kMargin = 4;

// One operand: [batch][row][k] in memory, what is made of it in [part][batch][row].
struct Factor {
    const float* data;
    int64_t batch_stride, row_stride, k_stride;
    int batches, rows, k, parts, part_k, pieces;
    uint4* pairs;
    uint32_t* heads;  // of rows; see head_of
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

// How many elements of a row are tiny but not 0, how many small, tiny or 0, and how many large, of
// those that have a small one among their neighbours.
struct Counts {
    int tiny, small, large;
};

__device__ inline Counts operator+(const Counts& a, const Counts& b) {
    return {a.tiny + b.tiny, a.small + b.small, a.large + b.large};
}

// How far rows reach: the fewest large elements that one has, kAlways where none has more than a few
// tiny ones, and the most small ones, kMany at most. Both in units, of which k has kUnits at most.
constexpr int kUnits = 4000, kMany = kUnits / kMargin, kAlways = 8191;

struct Reach {
    int large = kAlways, small = 0;

    __device__ void include(const Reach& other) {
        large = min(large, other.large);
        small = max(small, other.small);
    }
};

__device__ inline bool few(int tiny, int k) { return tiny <= max(4, k / 256); }

__device__ inline Reach reach_of(bool any, int large, int small, int part_k) {
    const int unit = part_k / kUnits + 1;
    return {any ? kAlways : large / unit, min((small + unit - 1) / unit, kMany)};
}

// What a product has to know of a split row: the exponent bits are what undoes its scale, the mantissa
// is its reach. With scale 0 pairs hold nothing of it.
constexpr int kSmallBits = 10;

__device__ inline uint32_t head_of(float scale, const Counts& counts, int k, int part_k) {
    if (scale == 0.0f) return kMany;
    const int small = counts.small - (part_k - k);  // without padding
    const Reach reach = reach_of(few(counts.tiny, k), counts.large, small, part_k);
    return __float_as_uint(1.0f / scale) | reach.large << kSmallBits | reach.small;
}

__device__ inline float undo_of(uint32_t head) { return __uint_as_float(head & 0xff800000u); }

__device__ inline Reach reach_of(uint32_t head) {
    return {int(head >> kSmallBits & kAlways), int(head & ((1 << kSmallBits) - 1))};
}

constexpr uint32_t kNoHead = kAlways << kSmallBits;

// Whether pairs of all these rows and columns give float32's accuracy.
__device__ inline bool suits(const Reach& rows, const Reach& columns) {
    return rows.large > kMargin * columns.small && columns.large > kMargin * rows.small;
}

struct Pairs {
    uint4 hi, lo;
};

// The least magnitude of the halves at each place of 4 pairs of them.
__device__ inline __half2 least_of(const void* pairs) {
    const __half2* const x = static_cast<const __half2*>(pairs);
    return __hmin2(__hmin2(__habs2(x[0]), __habs2(x[1])), __hmin2(__habs2(x[2]), __habs2(x[3])));
}

// Whether one of two is tiny or 0, which few are.
__device__ inline bool has_small(__half2 least) { return !__hbge2(least, __float2half2_rn(kTiny)); }

__device__ inline Pairs pairs_of(const float (&x)[8], float scale, Counts& counts) {
    Pairs made;
    __half2* const hi = reinterpret_cast<__half2*>(&made.hi);
    __half2* const lo = reinterpret_cast<__half2*>(&made.lo);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 v = {x[2 * e] * scale, x[2 * e + 1] * scale};
        hi[e] = __float22half2_rn(v);
        const float2 near = __half22float2(hi[e]);
        lo[e] = __floats2half2_rn(v.x - near.x, v.y - near.y);
    }
    if (!has_small(least_of(hi))) return made;
#pragma unroll
    for (const float one : x) {
        const float size = fabsf(one) * scale;
        counts.tiny += size < kTiny && one != 0.0f;
        counts.small += size < kTiny;
        counts.large += size >= kLarge;
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

__device__ inline Counts of_lane(const Counts& counts, int apart) {
    return {__shfl_xor_sync(~0u, counts.tiny, apart), __shfl_xor_sync(~0u, counts.small, apart),
            __shfl_xor_sync(~0u, counts.large, apart)};
}

template <int kLanes>
__device__ inline Counts sum_of(Counts x) {
    for (int apart = 1; apart < min(kLanes, 32); apart *= 2) x = x + of_lane(x, apart);
    if (kLanes <= 32) return x;
    __shared__ Counts of_warp[kSplitThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = {};
    for (const Counts& other : of_warp) x = x + other;
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
    Counts counts = {};
    uint4* const out = f.pairs + line * f.pieces * kLines;
#pragma unroll(kKeep ? kKeep : 1)
    for (int n = 0; kKeep == 0 || n < kKeep; ++n) {
        const int at = first + n * step;
        if (at >= f.pieces * kPiece || !is_row) break;
        if (!kKeep) load_row<kVector>(row, f.k_stride, at, kept[0]);
        const Pairs made = pairs_of(kept[kKeep ? n : 0], scale, counts);
        uint4* const pair = out + at / kPiece * kLines + at % kPiece / 8;
        pair[0] = made.hi;
        pair[kLines / 2] = made.lo;
    }
    counts = sum_of<kLanes>(counts);
    if (first == 0 && is_row) f.heads[line] = head_of(scale, counts, row.k, f.part_k);
}

// Where neighbours in memory are of one k and different rows, a cluster of blocks takes 32 rows, each
// block a share of k, and they tell each other the largest magnitudes. A warp has kKeep tiles of
// 32 x 32 in registers and reads again what it has more; it turns them in shared memory. Read once,
// that is 4096 x 4096 in 0.053 ms (H200); read twice by single blocks it was 0.071.
constexpr int kTurn = 32;
constexpr int kTurnThreads = 256;
constexpr int kMaxCluster = 8;

#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// What another block of the cluster has at the place of `mine`.
__device__ inline int of_block(const int* mine, int block) {
    int value;
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
    __shared__ int largest[kTurn], counted[kTurn][3];
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
    if (threadIdx.x < kTurn) {
        largest[threadIdx.x] = 0;
        for (int& count : counted[threadIdx.x]) count = 0;
    }
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
        if (lane < 8) atomicMax(&largest[column + c], int(most[c]));
    }
    cluster_sync();
    int whole = 0;  // of the row of this lane
    for (int b = 0; b < cluster; ++b) whole = max(whole, of_block(&largest[lane], b));
    const float scale = scale_of(whole);
    uint4* const out = f.pairs + (part * f.rows + group) * f.pieces * kLines;
    Counts counts[kTurn / 8] = {};
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
            const Pairs made = pairs_of(v, __shfl_sync(~0u, scale, row), counts[n]);
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
#pragma unroll
    for (int n = 0; n < kTurn / 8; ++n) {
        if (!__any_sync(~0u, counts[n].small)) continue;
        for (int apart = 1; apart < 4; apart *= 2) {
            counts[n] = counts[n] + of_lane(counts[n], apart);
        }
        if (lane % 4 != 0) continue;
        const int row = n * 8 + lane / 4;
        atomicAdd(&counted[row][0], counts[n].tiny);
        atomicAdd(&counted[row][1], counts[n].small);
        atomicAdd(&counted[row][2], counts[n].large);
    }
    cluster_sync();
    if (block == 0 && warp == 0) {
        Counts all = {};
        for (int b = 0; b < cluster; ++b) {
            const int* const own = counted[lane];
            all = all + Counts{of_block(own, b), of_block(own + 1, b), of_block(own + 2, b)};
        }
        const uint32_t head = head_of(scale, all, strip.k, f.part_k);
        if (lane < rows) f.heads[part * f.rows + group + lane] = head;
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
