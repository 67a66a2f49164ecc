// Products of split operands on Hopper's tensor cores: C[m][n] = sum over k of A[m][k] B[n][k], with
// lo * hi, hi * lo and hi * hi of each pair added up; lo * lo is below float32. Tensor cores cut off
// what they shift out when they add, which would drift by 3e-5 over k = 4096. So a run of 64 k at
// most is summed there, and runs by ordinary additions: of positive numbers a run is short by 1.8e-7,
// whatever k is, and by 0.9e-7 of those of both signs. The additions give most of it back, as a factor;
// the error over k = 256 falls from 1.9e-7 to 0.7e-7, and from 1.3e-7 to 1.0e-7.
//
// A block is two warpgroups that multiply, 64 rows of the tile each, and one thread that copies
// tiles into a ring of stages. Registers: 128 sums and 64 of a run, of half the tile's columns at a
// time; while one warpgroup adds up its run, the tensor cores work for the other.
//
// H200, 1024 x 8192 x 8192, product alone: 256 TFLOP/s of float32 while the chip runs at 1980 MHz,
// 215 to 225 once it meets its power limit. Slower there, measured: A through registers (2 %), runs
// of 32 k (8 %).
constexpr int kTileRows = 128, kTileColumns = 256;
constexpr int kStages = 4;
constexpr int kPieceBytes = 128;  // of a row in a stage
constexpr int kStageBytes = (kTileRows + kTileColumns) * kPieceBytes;
constexpr int kProductThreads = 384;
constexpr int kProductShared = kStages * kStageBytes + 1024;  // stages begin at a multiple of 1024
constexpr int kWarps = 8;                                     // that multiply

struct Product {
    int rows, columns, pieces, batches;  // parts of k are batches here
    int tile_rows, tile_columns, row_tiles, column_tiles;
    uint32_t* row_heads;     // null where rows are scaled back already
    uint32_t* column_heads;  // the same
    float* partial;          // the sums of each part, where k has several
    // Of each tile and warp: whether pairs do not suit some row and column there. A warp has 16 rows
    // of the tile, or 16 columns where it is turned.
    uint8_t* wide;
    bool turned;
    // 1 where only elements matter whose column is at most `diagonal` right of their row, -1 where
    // only those that are as much right of it at least.
    int triangle;
    int64_t diagonal;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A piece of as many rows as the map's box has, from `row` on.
__device__ inline void copy_pieces(void* to, const CUtensorMap& map, int piece, int row,
                                   uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
        "l"(&map), "r"(piece * 2 * kPiece), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// d = or += 64 rows of A times 128 of B over 16 k.
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;\n}\n"
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
        : "l"(a), "l"(b), "r"(int(add)));
}
#endif

// By what a run is multiplied for what was cut off: nothing where its first sums end in zeros, as those
// of small whole numbers do, which are exact.
__device__ inline float mend_of(const float (&run)[64]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= __float_as_uint(run[i]);
    return bits & 3 ? 1.0f + 0x1p-23f : 1.0f;
}

// A warp's sums of 32 columns on their way from the tensor cores' layout to rows, and what undoes the
// scales of the tile's side along which it goes: one wait for memory, where a load at each block would
// be eight.
constexpr int kBlockColumns = 32, kBlockPitch = 40;  // floats; 40 keeps banks apart
struct alignas(16) Desk {
    float block[16 * kBlockPitch];
    float undo[256];
};

// The heads of the side along which it goes, some in each lane.
struct Heads {
    uint32_t at[8];
};

__device__ inline Heads load_heads(const uint32_t* heads, int count) {
    Heads found;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int n = i * 32 + threadIdx.x % 32;
        found.at[i] = n < count ? heads[n] : kNoHead;
    }
    return found;
}

__device__ inline Reach bring(Desk& desk, const Heads& heads) {
    Reach reach;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        desk.undo[i * 32 + threadIdx.x % 32] = undo_of(heads.at[i]);
        reach.include(reach_of(heads.at[i]));
    }
    __syncwarp();
    return reach;
}

// Where sums go: the epilogue, or the part's share of the memory for parts.
template <typename Epilogue>
struct Sink {
    const Product& p;
    const Epilogue& epilogue;
    template <int kVec>
    __device__ void operator()(int64_t i, const Pack<float, kVec>& pack) const {
        if (p.partial) {
            pack_at<float, kVec>(p.partial, i) = pack;
        } else {
            epilogue(i, pack);
        }
    }
};

// Notes whether pairs suit the rows and columns of a warp; each lane has the reach of some.
__device__ inline void note_wide(const Product& p, int tile, Reach rows, Reach columns) {
    const bool all = !__any_sync(~0u, min(rows.large, columns.large) < kAlways);
    for (int apart = 1; apart < 32 && !all; apart *= 2) {
        rows.large = min(rows.large, __shfl_xor_sync(~0u, rows.large, apart));
        rows.small = max(rows.small, __shfl_xor_sync(~0u, rows.small, apart));
        columns.large = min(columns.large, __shfl_xor_sync(~0u, columns.large, apart));
        columns.small = max(columns.small, __shfl_xor_sync(~0u, columns.small, apart));
    }
    const bool is_wide = !all && !suits(rows, columns);
    if (threadIdx.x % 32 == 0) p.wide[tile * kWarps + threadIdx.x / 32] = is_wide;
}

// Writes a warp's 16 rows and 128 kHalves columns, `row` and `column` the first, whose heads are
// `heads`. A lane has the sums of rows `line` and line + 8, whose reach is `own` where they have no
// heads. `vector` says that packs of 4 are right.
template <int kHalves, typename Epilogue>
__device__ inline void finish(const Product& p, const Epilogue& epilogue, int tile, int64_t batch,
                              int row, int column, int line, const float (&sum)[kHalves][64],
                              const Heads& heads, Reach own, Desk& desk, bool vector) {
    const Sink<Epilogue> sink = {p, epilogue};
    const int lane = threadIdx.x % 32, rows = min(16, p.rows - row);
    const int columns = min(kHalves * 128, p.columns - column);
    float (&block)[16][kBlockPitch] = reinterpret_cast<float (&)[16][kBlockPitch]>(desk.block);
    float undo[2] = {1.0f, 1.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (p.row_heads == nullptr || line + h * 8 >= rows) continue;
        const uint32_t head = p.row_heads[batch * p.rows + row + line + h * 8];
        undo[h] = undo_of(head);
        own.include(reach_of(head));
    }
    note_wide(p, tile, own, bring(desk, heads));
#pragma unroll 1
    for (int b = 0; b < kHalves * 128 / kBlockColumns; ++b) {
        const int first = b * kBlockColumns;
        if (first >= columns) break;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < kHalves * 4; ++c) {  // registers have no run-time index
            if (c != b) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float* const two = &sum[c / 4][c % 4 * 16 + j * 2];
                float* const to = &block[line + j % 2 * 8][j / 2 * 8 + lane % 4 * 2];
                *reinterpret_cast<float2*>(to) = {two[0] * undo[j % 2], two[1] * undo[j % 2]};
            }
        }
        __syncwarp();
        const int n = vector ? lane % 8 * 4 : lane;
        if (first + n >= columns) continue;
        int64_t i = (batch * p.rows + row) * p.columns + column + first + n;
        if (vector) {
            const auto scale = pack_at<float, 4>(desk.undo, first + n);
            i += lane / 8 * int64_t(p.columns);
            constexpr int kAtOnce = Epilogue::kAtOnce;
#pragma unroll 1
            for (int m = lane / 8; m < rows; m += 4 * kAtOnce) {
                Pack<float, 4> packs[kAtOnce];
#pragma unroll
                for (int at = 0; at < kAtOnce; ++at) {
                    packs[at] = pack_at<float, 4>(block[m + at * 4], n);
                    for (int v = 0; v < 4; ++v) packs[at].at[v] *= scale.at[v];
                }
#pragma unroll
                for (int at = 0; at < kAtOnce; ++at, i += 4 * int64_t(p.columns)) {
                    if (m + at * 4 < rows) sink(i, packs[at]);
                }
            }
        } else {
            const float scale = desk.undo[first + n];
#pragma unroll 1
            for (int m = 0; m < rows; ++m, i += p.columns) {
                const Pack<float, 1> pack = {block[m][n] * scale};
                sink(i, pack);
            }
        }
    }
}

template <typename Epilogue>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map,
                   const __grid_constant__ CUtensorMap b_map, const __grid_constant__ Product p,
                   const __grid_constant__ Epilogue epilogue, bool vector) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
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
            const int row = place.batch * p.rows + place.row_tile * kTileRows;
            const int column = place.batch * p.columns + place.column_tile * kTileColumns;
            for (int piece = 0; piece < (place.matters ? p.pieces : 0); ++piece) {
                barrier_wait(&empty[stage], parity);
                barrier_expect(&full[stage], kStageBytes);
                char* const to = stages + stage * kStageBytes;
                copy_pieces(to, a_map, piece, row, &full[stage]);
                copy_pieces(to + kTileRows * kPieceBytes, b_map, piece, column, &full[stage]);
                if (++stage == kStages) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x / 32;
    uint32_t parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[2][64] = {};
        float run[64];
        const Place place = place_of(p, tile);
        const int row = place.row_tile * kTileRows + warp * 16;
        const int column = place.column_tile * kTileColumns;
        // On their way while the tensor cores work: over k = 64 that takes 3 % off.
        const Heads heads = load_heads(p.column_heads + int64_t(place.batch) * p.columns + column,
                                       p.columns - column);
        for (int piece = 0; piece < (place.matters ? p.pieces : 0); piece += 2) {
            uint64_t a[2], b[2];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const char* const at = stages + (stage + s) * kStageBytes;
                a[s] = matrix_descriptor(at + warpgroup * 64 * kPieceBytes);
                b[s] = matrix_descriptor(at + kTileRows * kPieceBytes);
                barrier_wait(&full[stage + s], parity);
            }
            // Descriptors count in 16 bytes: 16 k are 2 further, lo is 4 behind hi.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                pin(run);
                begin_multiplying();
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint64_t own = a[s], other = b[s] + half * (128 * kPieceBytes / 16);
                    multiply(run, own + 4, other, s > 0);
                    multiply(run, own + 6, other + 2, true);
                    multiply(run, own, other + 4, true);
                    multiply(run, own + 2, other + 6, true);
                }
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint64_t own = a[s], other = b[s] + half * (128 * kPieceBytes / 16);
                    multiply(run, own, other, true);
                    multiply(run, own + 2, other + 2, true);
                }
                commit_multiplying();
                finish_multiplying();
                pin(run);
                const float mend = mend_of(run);
#pragma unroll
                for (int i = 0; i < 64; ++i) sum[half][i] = fmaf(run[i], mend, sum[half][i]);
                pin(sum[half]);
            }
            if (threadIdx.x % 32 == 0) {
                barrier_arrive(&empty[stage]);
                barrier_arrive(&empty[stage + 1]);
            }
            stage += 2;
            if (stage == kStages) stage = 0, parity ^= 1;
        }
        finish(p, epilogue, tile, place.batch, row, column, threadIdx.x % 32 / 4, sum, heads, {},
               desks[warp], vector);
    }
#endif
}
