// What pairs do not hold: where some row or column of a tile has values of too wide a range,
// infinities or NaN, its 64 rows (or columns, where it is turned) are computed over again in float32
// from the operands themselves. The kernel is always launched and mostly finds nothing to do, so the
// host need not know.
constexpr int kExactTile = 64, kExactStep = 16, kExactRun = 256;
constexpr int kExactThreads = 256;
constexpr int kExactUnits = 4;  // of the other side of a tile at most

// Element [row][k] of a factor in shared memory, k by k.
__device__ inline void stage_factor(float (&to)[kExactStep][kExactTile + 4], const Factor& f,
                                    int64_t line, int row, int k) {
    for (int e = threadIdx.x; e < kExactStep * kExactTile; e += kExactThreads) {
        // Neighbours in memory for neighbouring threads.
        const int r = f.k_stride == 1 ? e / kExactStep : e % kExactTile;
        const int c = f.k_stride == 1 ? e % kExactStep : e / kExactTile;
        float x = 0.0f;
        if (row + r < f.rows) {
            const Strip strip = strip_of(f, line + row + r);
            if (k + c < strip.k) x = strip.data[(k + c) * f.k_stride];
        }
        to[c][r] = x;
    }
}

template <typename Epilogue>
__global__ void __launch_bounds__(kExactThreads)
    exact_kernel(const __grid_constant__ Factor a, const __grid_constant__ Factor b,
                 const __grid_constant__ Product p, const __grid_constant__ Epilogue epilogue) {
    __shared__ float rows[kExactStep][kExactTile + 4], columns[kExactStep][kExactTile + 4];
    __shared__ float made[kExactTile][kExactTile + 1];
    const Sink<Epilogue> sink = {p, epilogue};
    const int halves = p.row_tiles * p.column_tiles * p.batches * 2;  // of tiles: 4 warps each
    const int ranges = gridDim.x / kExactUnits, range = blockIdx.x / kExactUnits;
    const int first = int64_t(halves) * range / ranges,
              last = int64_t(halves) * (range + 1) / ranges;
    const int unit = blockIdx.x % kExactUnits * kExactTile;
    if (unit >= (p.turned ? p.tile_rows : p.tile_columns)) return;
    const uint32_t* const wide = reinterpret_cast<const uint32_t*>(p.wide);
    for (int from = first; from < last; from += kExactThreads) {
        const int mine = from + threadIdx.x;
        if (!__syncthreads_or(mine < last && wide[mine])) continue;
        for (int half = from; half < min(last, from + kExactThreads); ++half) {
            if (!wide[half]) continue;
            const Place place = place_of(p, half / 2);
            const int strip = half % 2 * kExactTile;
            const int row = place.row_tile * p.tile_rows + (p.turned ? unit : strip);
            const int column = place.column_tile * p.tile_columns + (p.turned ? strip : unit);
            const int64_t a_line = int64_t(place.batch) * p.rows;
            const int64_t b_line = int64_t(place.batch) * p.columns;
            const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
            const int k_end = strip_of(a, a_line).k;
            float sum[4][4] = {}, run[4][4] = {};
            for (int k = 0; k < k_end; k += kExactStep) {
                stage_factor(rows, a, a_line, row, k);
                stage_factor(columns, b, b_line, column, k);
                __syncthreads();
#pragma unroll 4
                for (int c = 0; c < kExactStep; ++c) {
#pragma unroll
                    for (int e = 0; e < 16; ++e) {
                        run[e / 4][e % 4] =
                            fmaf(rows[c][m + e / 4], columns[c][n + e % 4], run[e / 4][e % 4]);
                    }
                }
                __syncthreads();
                if (k % kExactRun == kExactRun - kExactStep || k + kExactStep >= k_end) {
#pragma unroll
                    for (int e = 0; e < 16; ++e) {
                        sum[e / 4][e % 4] += run[e / 4][e % 4];
                        run[e / 4][e % 4] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 16; ++e) made[m + e / 4][n + e % 4] = sum[e / 4][e % 4];
            __syncthreads();
#pragma unroll 1
            for (int e = threadIdx.x; e < kExactTile * kExactTile; e += kExactThreads) {
                const int r = row + e / kExactTile, c = column + e % kExactTile;
                if (r >= p.rows || c >= p.columns) continue;
                const Pack<float, 1> pack = {made[e / kExactTile][e % kExactTile]};
                sink((a_line + r) * p.columns + c, pack);
            }
            __syncthreads();
        }
    }
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
