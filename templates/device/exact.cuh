// What pairs do not suit: where a warp has noted it, the 64 rows of a tile (or columns, where it is
// turned) are computed over again in float32 from the operands themselves. The kernel is always
// launched and mostly finds nothing to do, so the host need not know.
//
// A block does a strip of 64 by 128 of the other side.
constexpr int kExactStrip = 64, kExactOther = 128, kExactStep = 8, kExactRun = 256;
constexpr int kExactThreads = 256;
constexpr int kExactUnits = 2;   // of the other side of a tile at most
constexpr int kExactBlocks = 2;  // of a multiprocessor

// A few k of some rows of a factor, a share in each thread's registers on the way to shared memory.
template <int kRows>
struct Step {
    float x[kRows * kExactStep / kExactThreads];

    // Does something for each element: its number, row and k. Neighbouring threads have neighbours in
    // memory.
    template <typename Do>
    __device__ static void each(const Factor& f, const Do& what) {
#pragma unroll
        for (int n = 0; n < kRows * kExactStep / kExactThreads; ++n) {
            const int e = n * kExactThreads + threadIdx.x;
            const bool along = f.k_stride == 1;
            what(n, along ? e / kExactStep : e % kRows, along ? e % kExactStep : e / kRows);
        }
    }

    // From `first` on, of which `rows` are there.
    __device__ void load(const Factor& f, const Strip& first, int rows, int k) {
        each(f, [&](int n, int row, int at) {
            const bool inside = row < rows && k + at < first.k;
            x[n] = inside ? first.data[row * f.row_stride + (k + at) * f.k_stride] : 0.0f;
        });
    }

    __device__ void store(const Factor& f, float (&to)[kExactStep][kRows + 4]) const {
        each(f, [&](int n, int row, int at) { to[at][row] = x[n]; });
    }
};

struct alignas(16) ExactStage {
    float strip[kExactStep][kExactStrip + 4], other[kExactStep][kExactOther + 4];
};

template <typename Epilogue>
__global__ void __launch_bounds__(kExactThreads, kExactBlocks)
    exact_kernel(const __grid_constant__ Factor a, const __grid_constant__ Factor b,
                 const __grid_constant__ Product p, const __grid_constant__ Epilogue epilogue) {
    __shared__ ExactStage stages[2];
    __shared__ float made[kExactStrip][kExactOther + 1];
    const Sink<Epilogue> sink = {p, epilogue};
    const int halves = p.row_tiles * p.column_tiles * p.batches * 2;  // of tiles: 4 warps each
    const int ranges = gridDim.x / kExactUnits, range = blockIdx.x / kExactUnits;
    const int first = int64_t(halves) * range / ranges,
              last = int64_t(halves) * (range + 1) / ranges;
    const int unit = blockIdx.x % kExactUnits * kExactOther;
    if (unit >= (p.turned ? p.tile_rows : p.tile_columns)) return;
    const Factor& own = p.turned ? b : a;
    const Factor& facing = p.turned ? a : b;
    const uint32_t* const wide = reinterpret_cast<const uint32_t*>(p.wide);
    for (int from = first; from < last; from += kExactThreads) {
        const int mine = from + threadIdx.x;
        if (!__syncthreads_or(mine < last && wide[mine])) continue;
        for (int half = from; half < min(last, from + kExactThreads); ++half) {
            if (!wide[half]) continue;
            const Place place = place_of(p, half / 2);
            const int row_start = place.row_tile * p.tile_rows;
            const int column_start = place.column_tile * p.tile_columns;
            const int line = (p.turned ? column_start : row_start) + half % 2 * kExactStrip;
            const int other = (p.turned ? row_start : column_start) + unit;
            const int lines = min(own.rows - line, kExactStrip);
            const int others = min(facing.rows - other, kExactOther);
            if (lines <= 0 || others <= 0) continue;
            const Strip strip = strip_of(own, int64_t(place.batch) * own.rows + line);
            const Strip faced = strip_of(facing, int64_t(place.batch) * facing.rows + other);
            const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
            float run[4][8] = {};
            Step<kExactStrip> strip_step;
            Step<kExactOther> other_step;
            strip_step.load(own, strip, lines, 0);
            other_step.load(facing, faced, others, 0);
            for (int k = 0, turn = 0; k < strip.k; k += kExactStep, turn ^= 1) {
                ExactStage& in = stages[turn];
                strip_step.store(own, in.strip);
                other_step.store(facing, in.other);
                __syncthreads();
                strip_step.load(own, strip, lines, k + kExactStep);
                other_step.load(facing, faced, others, k + kExactStep);
#pragma unroll 4
                for (int c = 0; c < kExactStep; ++c) {
                    const auto x = pack_at<float, 4>(in.strip[c], m);
                    const Pack<float, 4> y[2] = {pack_at<float, 4>(in.other[c], n),
                                                 pack_at<float, 4>(in.other[c], n + 64)};
#pragma unroll
                    for (int e = 0; e < 32; ++e) {
                        float& one = run[e / 8][e % 8];
                        one = fmaf(x.at[e / 8], y[e / 4 % 2].at[e % 4], one);
                    }
                }
                if (k % kExactRun == kExactRun - kExactStep || k + kExactStep >= strip.k) {
#pragma unroll
                    for (int e = 0; e < 32; ++e) {
                        float& sum = made[m + e / 8][n + e / 4 % 2 * 64 + e % 4];
                        sum = k < kExactRun ? run[e / 8][e % 8] : sum + run[e / 8][e % 8];
                        run[e / 8][e % 8] = 0.0f;
                    }
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int e = threadIdx.x; e < kExactStrip * kExactOther; e += kExactThreads) {
                const int l = p.turned ? e % kExactStrip : e / kExactOther;
                const int o = p.turned ? e / kExactStrip : e % kExactOther;
                if (l >= lines || o >= others) continue;
                const int row = p.turned ? other + o : line + l;
                const int column = p.turned ? line + l : other + o;
                const Pack<float, 1> pack = {made[l][o]};
                sink((int64_t(place.batch) * p.rows + row) * p.columns + column, pack);
            }
            __syncthreads();
        }
    }
}
