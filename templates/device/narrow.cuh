// A product where one operand has so few rows that splitting the other one first would cost more than
// it saves: the long operand comes in as float32, and each warpgroup splits what it multiplies on the
// way from shared memory to the tensor cores, which take it as registers. Scales are of a row and 32
// k, so a run is of 32 k too.
//
// Of the long operand a tile has 128 rows, 64 a warpgroup, of the short one 128 or 256.
constexpr int kLongRows = 128;
// Of the short operand at most: with 512 rows, 512 x 8192 x 8192 takes 0.36 ms for the 0.42 of
// splitting both; 128 rows 0.13 for 0.23 (H200). Over a short k, runs of 32 would round more often
// than cuBLAS's float32 does.
constexpr int kNarrowRows = 512;
constexpr int kNarrowLeast = 256;

constexpr int kLongBytes = kLongRows * kPiece * 4;

template <int kHalves>
constexpr int kNarrowBytes = kLongBytes + kHalves * 128 * kPieceBytes;
template <int kHalves>
constexpr int kNarrowStages = kHalves == 1 ? 6 : 4;
template <int kHalves>
constexpr int kNarrowShared = kNarrowStages<kHalves> * kNarrowBytes<kHalves> + 1024;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d = or += 64 rows of A, in registers, times 128 of B over 16 k.
__device__ inline void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// What a lane has of one row of the long operand in a stage, 16 k and 16 k.
struct Share {
    float x[2][2][2];  // of each 16: two neighbours, and two 8 further
};

// A stage of the long operand as registers: hi and lo of the first and the last 16 k, and what undoes
// the scales of the two rows that a lane has.
struct Fragment {
    uint32_t hi[2][4], lo[2][4];
    float undo[2];
};

// The first or the last 16 k of it. `line` is the row in the tile, `across` says that a stage has 4
// blocks of 32 rows, k by k.
__device__ inline void load_half(float (&x)[2][2], const char* stage, int line, int s,
                                 bool across) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (across) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int k = s * 16 + h * 8 + q * 2 + e;
                const int place = (line % 32 / 4 ^ k % 8) * 16 + line % 4 * 4;
                x[h][e] =
                    *reinterpret_cast<const float*>(stage + line / 32 * 4096 + k * 128 + place);
            }
        } else {
            const int place = ((s * 4 + h * 2 + q / 2) ^ line % 8) * 16 + q % 2 * 8;
            const float2 v = *reinterpret_cast<const float2*>(stage + line * 128 + place);
            x[h][0] = v.x, x[h][1] = v.y;
        }
    }
}

__device__ inline Share share_of(const char* stage, int line, bool across) {
    Share share;
    load_half(share.x[0], stage, line, 0, across);
    load_half(share.x[1], stage, line, 1, across);
    return share;
}

// Of the stages of a lane's two rows that are not 0, the least and the largest of the largest
// magnitudes: their upper 16 bits, and of the least one less.
struct Ranges {
    uint32_t least = ~0u, most = 0;

    __device__ void include(uint32_t above, uint32_t below) {
        const uint32_t both = __byte_perm(above, below, 0x7632);
        least = __vminu2(least, both - 0x00010001u);  // so that 0 is no least one
        most = __vmaxu2(most, both);
    }
    // The exponents of row 0 or 1.
    __device__ int least_of(int row) const { return least >> row * 16 + 7 & 511; }
    __device__ int most_of(int row) const { return most >> row * 16 + 7 & 511; }
};

// NaN where one is.
__device__ inline float larger_of(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Splits a row's 32 k between its four lanes: row 0 of a fragment or, where kRow is 1, row 8.
// Gives its largest magnitude.
template <int kRow>
__device__ inline uint32_t split_share(const Share& share, Fragment& made) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        largest = larger_of(largest, fabsf(share.x[i / 4][i / 2 % 2][i % 2]));
    }
    uint32_t most = __float_as_uint(largest);
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const uint32_t exponent = min(max(most >> 23, 79u), 203u);
    const float scale = __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 v = {share.x[s][h][0] * scale, share.x[s][h][1] * scale};
            const __half2 near = __float22half2_rn(v);
            const float2 back = __half22float2(near);
            const __half2 rest = __floats2half2_rn(v.x - back.x, v.y - back.y);
            made.hi[s][h * 2 + kRow] = *reinterpret_cast<const uint32_t*>(&near);
            made.lo[s][h * 2 + kRow] = *reinterpret_cast<const uint32_t*>(&rest);
        }
    }
    made.undo[kRow] = __uint_as_float((exponent - 14) << 23);
    return most;
}

// Counts half of what split_share has made a fragment of. They are `whole` where no k is padding.
__device__ inline void count(Counts& counts, const float (&x)[2][2], float undo, bool whole) {
    const float scale = 1.0f / undo;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float one = x[i / 2][i % 2], size = fabsf(one) * scale;
        counts.tiny += size < kTiny && one != 0.0f;
        counts.small += size < kTiny && whole;
        counts.large += size >= kLarge;
    }
}

// What each lane of a warp knows of its two rows, in memory since all registers are taken.
struct Tallies {
    Ranges ranges[32];
    Counts counts[2][32];
};
static_assert(sizeof(Tallies) <= sizeof(Desk::block), "");

// Its scales go by 32 k: where they differ much, what is large beside one is not beside the row.
__device__ inline Reach reach_of(Counts counts, int least, int most, int k, int part_k) {
    for (int apart = 1; apart < 4; apart *= 2) counts = counts + of_lane(counts, apart);
    const bool even = max(most, 79) - max(least, 79) < 12;
    const bool any = most <= 203 && (even ? few(counts.tiny, k) : counts.tiny == 0);
    return reach_of(any, even && most <= 203 ? counts.large : 0, even ? counts.small : part_k,
                    part_k);
}
#endif

// As `finish`, where a warp has 16 columns and 128 kHalves rows: its lanes' sums are of a column.
template <int kHalves, typename Epilogue>
__device__ inline void finish_turned(const Product& p, const Epilogue& epilogue, int tile,
                                     int64_t batch, int row, int column, int line,
                                     const float (&sum)[kHalves][64], const Reach& own, Desk& desk,
                                     bool vector) {
    constexpr int kPitch = 20;
    const Sink<Epilogue> sink = {p, epilogue};
    const int lane = threadIdx.x % 32, columns = min(16, p.columns - column);
    const int rows = min(kHalves * 128, p.rows - row);
    float (&block)[kBlockColumns][kPitch] =
        reinterpret_cast<float (&)[kBlockColumns][kPitch]>(desk.block);
    const Heads heads = load_heads(p.row_heads + batch * p.rows + row, rows);
    note_wide(p, tile, bring(desk, heads), own);
    const int width = vector ? 4 : 1, n = lane * width % 16;
#pragma unroll 1
    for (int b = 0; b < kHalves * 128 / kBlockColumns; ++b) {
        const int first = b * kBlockColumns, last = min(rows, first + kBlockColumns);
        if (first >= rows) break;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < kHalves * 4; ++c) {
            if (c != b) continue;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                block[j / 4 * 8 + lane % 4 * 2 + j % 2][line + j / 2 % 2 * 8] =
                    sum[c / 4][c % 4 * 16 + j];
            }
        }
        __syncwarp();
        if (n >= columns) continue;
        int m = first + lane * width / 16;
        int64_t i = (batch * p.rows + row + m) * p.columns + column + n;
#pragma unroll 1
        for (; m < last; m += 2 * width, i += 2 * width * int64_t(p.columns)) {
            const float scale = desk.undo[m];
            if (vector) {
                auto pack = pack_at<float, 4>(block[m - first], n);
                for (int v = 0; v < 4; ++v) pack.at[v] *= scale;
                sink(i, pack);
            } else {
                const Pack<float, 1> pack = {block[m - first][n] * scale};
                sink(i, pack);
            }
        }
    }
}

// The long operand's map has [batch][row][k], or [batch][k][row] where it lies across.
template <int kHalves, typename Epilogue>
__global__ void __launch_bounds__(kProductThreads, 1)
    narrow_kernel(const __grid_constant__ CUtensorMap long_map,
                  const __grid_constant__ CUtensorMap short_map, const __grid_constant__ Product p,
                  const __grid_constant__ Epilogue epilogue, int batches, int k, bool across,
                  bool vector) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kStages = kNarrowStages<kHalves>, kStageBytes = kNarrowBytes<kHalves>;
    extern __shared__ char memory[];
    __shared__ uint64_t full[kStages], empty[kStages];
    __shared__ Desk desks[kWarps];
    char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], kWarps);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int tiles = p.row_tiles * p.column_tiles * p.batches;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    int stage = 0;
    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 128 != 0) return;
        uint32_t parity = 1;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place place = place_of(p, tile);
            const int row = place.row_tile * p.tile_rows,
                      column = place.column_tile * p.tile_columns;
            const int first = p.turned ? column : row;
            const int other =
                place.batch * (p.turned ? p.rows : p.columns) + (p.turned ? row : column);
            for (int piece = 0; piece < (place.matters ? p.pieces : 0); ++piece) {
                barrier_wait(&empty[stage], parity);
                barrier_expect(&full[stage], kStageBytes);
                char* const to = stages + stage * kStageBytes;
                const int at = (place.batch / batches * p.pieces + piece) * kPiece;
                if (across) {
                    for (int b = 0; b < kLongRows / 32; ++b) {
                        copy_box(to + b * 4096, long_map, first + b * 32, at, place.batch % batches,
                                 &full[stage]);
                    }
                } else {
                    copy_box(to, long_map, at, first, place.batch % batches, &full[stage]);
                }
                copy_pieces(to + kLongBytes, short_map, piece, other, &full[stage]);
                if (++stage == kStages) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Rows of a fragment in an order that keeps banks apart: 0, 2, 4, 6, 1, 3, 5, 7.
    const int turn = lane / 4 % 4 * 2 + lane / 16, line = warp * 16 + turn;
    uint32_t parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile);
        const int pieces = place.matters ? p.pieces : 0;
        const int k_here = min(p.pieces * kPiece, k - place.batch / batches * p.pieces * kPiece);
        float sum[kHalves][64] = {};
        Tallies& tallies = reinterpret_cast<Tallies&>(desks[warp].block);
        Counts(&counts)[2][32] = tallies.counts;
        counts[0][lane] = counts[1][lane] = {};
        tallies.ranges[lane] = {};
        // The next stage is split while the tensor cores work, where registers suffice for it.
        constexpr bool kAhead = kHalves == 1;
        Fragment fragments[1 + kAhead];
        const auto prepare = [&](int ahead, Fragment& made) {
            const int at = stage + ahead < kStages ? stage + ahead : 0;
            barrier_wait(&full[at], at < stage ? parity ^ 1 : parity);
            const char* const from = stages + at * kStageBytes;
            const Share above = share_of(from, line, across);
            const Share below = share_of(from, line + 8, across);
            tallies.ranges[lane].include(split_share<0>(above, made), split_share<1>(below, made));
        };
        const auto tally = [&](int piece, const Fragment& made) {
            const char* const from = stages + stage * kStageBytes;
            const bool whole = (piece + 1) * kPiece <= k_here;
#pragma unroll 1
            for (int half = 0; half < 4; ++half) {
                float x[2][2];
                load_half(x, from, line + half / 2 * 8, half % 2, across);
                count(counts[half / 2][lane], x, half < 2 ? made.undo[0] : made.undo[1], whole);
            }
        };
        if (kAhead && pieces > 0) prepare(0, fragments[0]);
        for (int pair = 0; pair < pieces; pair += 2) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                if (!kAhead) prepare(0, fragments[0]);
                const Fragment& a = fragments[kAhead && s];
                const uint64_t b = matrix_descriptor(stages + stage * kStageBytes + kLongBytes);
                bool small;
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    const uint64_t other = b + half * (128 * kPieceBytes / 16);
                    float run[64];
                    begin_multiplying();
                    multiply(run, a.lo[0], other, false);
                    multiply(run, a.lo[1], other + 2, true);
                    multiply(run, a.hi[0], other + 4, true);
                    multiply(run, a.hi[1], other + 6, true);
                    multiply(run, a.hi[0], other, true);
                    multiply(run, a.hi[1], other + 2, true);
                    commit_multiplying();
                    if (half == 0) {
                        small = __any_sync(
                            ~0u, has_small(__hmin2(least_of(a.hi[0]), least_of(a.hi[1]))));
                    }
                    if (kAhead && pair + s + 1 < pieces) {
                        prepare(1, fragments[kAhead && 1 - s]);
                    }
                    finish_multiplying();
                    pin(run);
#pragma unroll
                    for (int i = 0; i < 64; ++i) {
                        sum[half][i] = fmaf(run[i], a.undo[i / 2 % 2], sum[half][i]);
                    }
                    pin(sum[half]);
                }
                if (small) tally(pair + s, a);
                if (lane == 0) barrier_arrive(&empty[stage]);
                if (++stage == kStages) stage = 0, parity ^= 1;
            }
        }
        const int row = place.row_tile * p.tile_rows, column = place.column_tile * p.tile_columns;
        const int left = p.turned ? p.columns - column : p.rows - row;
        // Runs of 32 are short by half of what those of 64 are. By rounding, this adds one in the last
        // place where a mantissa is 1.18 at least: 0.6e-7 on average.
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const float mend = 0.425f * (mend_of(sum[half]) - 1.0f);
#pragma unroll
            for (float& one : sum[half]) one = fmaf(one, mend, one);
        }
        Reach own;
        const Ranges ranges = tallies.ranges[lane];
        for (int h = 0; h < 2; ++h) {
            const Reach reach = reach_of(counts[h][lane], ranges.least_of(h), ranges.most_of(h),
                                         k_here, p.pieces * kPiece);
            if (line + h * 8 < left) own.include(reach);
        }
        if (p.turned) {
            finish_turned(p, epilogue, tile, place.batch, row, column + warp * 16, turn, sum, own,
                          desks[warp], vector);
        } else {
            const Heads heads =
                load_heads(p.column_heads + int64_t(place.batch) * p.columns + column,
                           min(kHalves * 128, p.columns - column));
            finish(p, epilogue, tile, place.batch, row + warp * 16, column, turn, sum, heads, own,
                   desks[warp], vector);
        }
    }
#endif
}
