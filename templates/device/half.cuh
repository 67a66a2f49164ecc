// Products of float16 or bfloat16 on Hopper's tensor cores: C[m][n] = sum over k of A[m][k] B[n][k] in
// float32. Operands are multiplied as they lie, neighbours in memory of one row or, `across`, of one k:
// the copy engine brings in blocks of 64 lines of 64 neighbours, and the tensor cores turn them.
//
// A block is two warpgroups that multiply, 64 rows of the tile each, and one thread that copies
// tiles into a ring of stages. Each warpgroup has two stages under way, so that the tensor cores go on
// while it waits for the first.
constexpr int kHalfRows = 128, kHalfColumns = 256, kHalfDepth = 64;
constexpr int kHalfBlock = 64;  // lines, of as many neighbours
constexpr int kHalfBlockBytes = kHalfBlock * kHalfDepth * 2;
constexpr int kHalfStageBytes = (kHalfRows + kHalfColumns) * kHalfDepth * 2;
constexpr int kHalfStages = 4;
// Stages begin at a multiple of 1024.
constexpr int kHalfShared = kHalfStages * kHalfStageBytes + 1024;
constexpr int kHalfThreads = 384;
constexpr int kHalfWarps = 8;    // that multiply
constexpr int kHalfRound = 768;  // for parts_of: a third of split products' time for each k

struct HalfProduct {
    int rows, columns, k, part_k;
    int batches, each;  // parts of k are batches here, of which each part has so many
    int tile_rows, tile_columns, row_tiles, column_tiles;
    bool a_across, b_across;
    int triangle;  // see Product
    int64_t diagonal;
    float* partial;  // the sums of each part, where k has several
};

template <typename T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<__nv_bfloat16> = true;

// The k of a batch of a product: the first, and how many stages they fill.
struct Stretch {
    int first, stages;
};

__device__ inline Stretch stretch_of(const HalfProduct& p, const Place& place) {
    const int first = place.batch / p.each * p.part_k, k = min(p.part_k, p.k - first);
    return {first, place.matters ? (k + kHalfDepth - 1) / kHalfDepth : 0};
}

// A stage of the ring, and the parity of its barriers' phase.
struct Ring {
    char* stages;
    uint64_t *full, *empty;
    int stage;
    uint32_t parity;

    __device__ char* memory() const { return stages + stage * kHalfStageBytes; }
    __device__ void advance() {
        if (++stage == kHalfStages) stage = 0, parity ^= 1;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d += 64 rows of A times 256 of B over 16 k.
template <typename T, bool kAcrossA, bool kAcrossB>
__device__ inline void multiply_halves(float (&d)[128], uint64_t a, uint64_t b) {
#define EIGHT(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define MULTIPLY(type)                                                                          \
    asm volatile(                                                                               \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                            \
        " "                                                                                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "     \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "      \
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "      \
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "      \
        "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "      \
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "      \
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "          \
        "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "        \
        "%124, %125, %126, %127}, "                                                             \
        "%128, %129, 1, 1, 1, %130, %131;\n"                                                    \
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), \
          EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112),        \
          EIGHT(120)                                                                            \
        : "l"(a), "l"(b), "n"(int(kAcrossA)), "n"(int(kAcrossB)))
    if constexpr (kIsBfloat16<T>) {
        MULTIPLY("bf16");
    } else {
        MULTIPLY("f16");
    }
#undef MULTIPLY
#undef EIGHT
}

// All but the instructions that were committed last.
__device__ inline void finish_previous() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Lines of 128 bytes, swizzled: rows, or k of 64 rows each.
template <bool kAcross>
__device__ inline uint64_t half_descriptor(const void* at) {
    const uint64_t apart = kAcross ? kHalfBlockBytes >> 4 : 0;  // the next 64 rows
    return matrix_descriptor(at) | apart << 16;
}

// The sums of a tile's 64 rows over so many stages.
template <typename T, bool kAcrossA, bool kAcrossB>
__device__ inline void sum_up(float (&sum)[128], Ring& ring, int stages) {
    // In 16 bytes, to the next 16 k.
    constexpr int kStepA = kAcrossA ? 16 * 128 / 16 : 2, kStepB = kAcrossB ? 16 * 128 / 16 : 2;
    const int warpgroup = threadIdx.x / 128;
    uint64_t* previous = nullptr;
#pragma unroll 1
    for (int n = 0; n < stages; ++n) {
        barrier_wait(&ring.full[ring.stage], ring.parity);
        const char* const memory = ring.memory();
        const uint64_t a = half_descriptor<kAcrossA>(memory + warpgroup * kHalfBlockBytes);
        const uint64_t b = half_descriptor<kAcrossB>(memory + kHalfRows * kHalfDepth * 2);
        begin_multiplying();
#pragma unroll
        for (int s = 0; s < kHalfDepth / 16; ++s) {
            multiply_halves<T, kAcrossA, kAcrossB>(sum, a + s * kStepA, b + s * kStepB);
        }
        commit_multiplying();
        finish_previous();
        if (previous && threadIdx.x % 32 == 0) barrier_arrive(previous);
        previous = &ring.empty[ring.stage];
        ring.advance();
    }
    finish_multiplying();
    pin(sum);
    if (previous && threadIdx.x % 32 == 0) barrier_arrive(previous);
}
#endif

// Sums go to the epilogue, or to the part's share of the memory for parts.
template <int kVec, typename Epilogue>
__device__ inline void put(const HalfProduct& p, const Epilogue& epilogue, int64_t i,
                           const Pack<float, kVec>& pack) {
    if (p.partial) {
        pack_at<float, kVec>(p.partial, i) = pack;
    } else {
        epilogue(i, pack);
    }
}

// Writes a warp's 16 rows and 256 columns, `row` and `column` the first, by way of `block`: from the
// tensor cores' layout to rows. `vector` says that packs of 4 are right.
constexpr int kHalfDesk = 32, kHalfPitch = 40;  // columns at a time; 40 floats keep banks apart
template <typename Epilogue>
__device__ inline void write_sums(const HalfProduct& p, const Epilogue& epilogue, int64_t batch,
                                  int row, int column, const float (&sum)[128],
                                  float (&block)[16][kHalfPitch], bool vector) {
    const int lane = threadIdx.x % 32, rows = min(16, p.rows - row);
    const int columns = min(kHalfColumns, p.columns - column);
#pragma unroll 1
    for (int b = 0; b < kHalfColumns / kHalfDesk; ++b) {
        const int first = b * kHalfDesk;
        if (first >= columns) break;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < kHalfColumns / kHalfDesk; ++c) {  // registers have no run-time index
            if (c != b) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float* const two = &sum[c * 16 + j * 2];
                float* const to = &block[lane / 4 + j % 2 * 8][j / 2 * 8 + lane % 4 * 2];
                *reinterpret_cast<float2*>(to) = {two[0], two[1]};
            }
        }
        __syncwarp();
        const int width = vector ? 4 : 1, n = lane * width % kHalfDesk;
        if (first + n >= columns) continue;
        int m = lane * width / kHalfDesk;
        int64_t i = (batch * p.rows + row + m) * p.columns + column + first + n;
#pragma unroll 1
        for (; m < rows; m += width, i += width * int64_t(p.columns)) {
            if (vector) {
                put(p, epilogue, i, pack_at<float, 4>(block[m], n));
            } else {
                put(p, epilogue, i, pack_at<float, 1>(block[m], n));
            }
        }
    }
}

template <typename T, typename Epilogue>
__global__ void __launch_bounds__(kHalfThreads, 1)
    half_kernel(const __grid_constant__ CUtensorMap a_map,
                const __grid_constant__ CUtensorMap b_map, const __grid_constant__ HalfProduct p,
                const __grid_constant__ Epilogue epilogue, bool vector) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    __shared__ uint64_t full[kHalfStages], empty[kHalfStages];
    __shared__ alignas(16) float desks[kHalfWarps][16][kHalfPitch];
    if (threadIdx.x == 0) {
        for (int s = 0; s < kHalfStages; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], kHalfWarps);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int tiles = p.row_tiles * p.column_tiles * p.batches;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    Ring ring = {memory + (1024 - shared_address(memory) % 1024) % 1024, full, empty, 0, 0};
    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 128 != 0) return;
        ring.parity = 1;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place place = place_of(p, tile);
            const Stretch stretch = stretch_of(p, place);
            const int row = place.row_tile * kHalfRows, column = place.column_tile * kHalfColumns;
            for (int n = 0; n < stretch.stages; ++n, ring.advance()) {
                uint64_t* const barrier = &full[ring.stage];
                const int k = stretch.first + n * kHalfDepth;
                barrier_wait(&empty[ring.stage], ring.parity);
                barrier_expect(barrier, kHalfStageBytes);
#pragma unroll
                for (int b = 0; b < (kHalfRows + kHalfColumns) / kHalfBlock; ++b) {
                    const bool is_a = b < kHalfRows / kHalfBlock;
                    const bool across = is_a ? p.a_across : p.b_across;
                    const int line = (is_a ? row : column - kHalfRows) + b * kHalfBlock;
                    copy_box(ring.memory() + b * kHalfBlockBytes, is_a ? a_map : b_map,
                             across ? line : k, across ? k : line, place.batch % p.each, barrier);
                }
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x / 32;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile);
        const int stages = stretch_of(p, place).stages;
        float sum[128] = {};
        if (p.a_across) {
            if (p.b_across) {
                sum_up<T, true, true>(sum, ring, stages);
            } else {
                sum_up<T, true, false>(sum, ring, stages);
            }
        } else if (p.b_across) {
            sum_up<T, false, true>(sum, ring, stages);
        } else {
            sum_up<T, false, false>(sum, ring, stages);
        }
        write_sums(p, epilogue, place.batch, place.row_tile * kHalfRows + warp * 16,
                   place.column_tile * kHalfColumns, sum, desks[warp], vector);
    }
#endif
}

inline HalfProduct half_product_of(const Problem& problem) {
    HalfProduct p = {};
    p.rows = problem.a.rows, p.columns = problem.b.rows, p.k = problem.k;
    p.each = problem.batches;
    p.tile_rows = kHalfRows, p.tile_columns = kHalfColumns;
    p.row_tiles = tiles_of(p.rows, kHalfRows), p.column_tiles = tiles_of(p.columns, kHalfColumns);
    const int64_t tiles = int64_t(p.each) * p.row_tiles * p.column_tiles;
    const int parts = parts_of(tiles, p.k, problem.processors, kHalfRound);
    p.part_k = part_of(p.k, parts);
    p.batches = parts * p.each;
    p.a_across = problem.a.k_stride != 1, p.b_across = problem.b.k_stride != 1;
    p.triangle = problem.triangle, p.diagonal = problem.diagonal;
    p.partial = parts > 1 ? static_cast<float*>(problem.workspace) : nullptr;
    return p;
}

int64_t half_workspace_bytes(const Problem& problem) {
    const HalfProduct p = half_product_of(problem);
    const int64_t count = int64_t(p.rows) * p.columns * p.batches;
    return p.batches > p.each ? count * int64_t(sizeof(float)) : 0;
}

// Blocks of 64 lines of 64 neighbours.
template <typename T>
bool describe_half(CUtensorMap& map, const Side& side, const Problem& problem) {
    const bool across = side.k_stride != 1;
    const cuuint64_t k = problem.k, rows = side.rows, batches = problem.batches;
    const cuuint64_t line = (across ? side.k_stride : side.row_stride) * sizeof(T);
    const cuuint64_t batch = batches > 1 ? side.batch_stride * sizeof(T) : line;
    const cuuint64_t size[] = {across ? rows : k, across ? k : rows, batches};
    const cuuint64_t strides[] = {line, batch};
    const cuuint32_t box[] = {kHalfBlock, kHalfBlock, 1};
    const auto type =
        kIsBfloat16<T> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return describe(map, type, 3, side.data, size, strides, box);
}

template <typename T, typename Epilogue>
cudaError_t run_half_product(const Epilogue& epilogue, const Problem& problem,
                             cudaStream_t stream) {
    const HalfProduct p = half_product_of(problem);
    CUtensorMap a, b;
    const bool described =
        describe_half<T>(a, problem.a, problem) && describe_half<T>(b, problem.b, problem);
    if (!described) return cudaErrorInvalidValue;
    const bool whole = p.columns % 4 == 0 && epilogue.ops.whole != 0;
    const bool vector = p.columns % 4 == 0 && (p.partial || whole);
    const int tiles = p.row_tiles * p.column_tiles * p.batches;
    const unsigned grid = min(problem.processors, tiles);
    const auto kernel = half_kernel<T, Epilogue>;
    const cudaError_t error = with_shared(kernel, kHalfShared);
    if (error != cudaSuccess) return error;
    kernel<<<grid, kHalfThreads, kHalfShared, stream>>>(a, b, p, epilogue, vector);
    if (p.partial) {
        const int64_t count = int64_t(p.rows) * p.columns * p.each;
        const auto sum = whole ? add_parts_kernel<4, Epilogue> : add_parts_kernel<1, Epilogue>;
        sum<<<blocks(whole ? count / 4 : count), kThreads, 0, stream>>>(epilogue, p.partial,
                                                                        p.batches / p.each, count);
    }
    return cudaGetLastError();
}
