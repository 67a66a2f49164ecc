// The launches of a product: its operands split, multiplied, what pairs do not hold computed over
// again, and the parts of k added up where there are several.

// How a product is computed, by its sizes and by how its operands lie.
struct Form {
    bool narrow, long_is_a, across;  // see device/narrow.cuh
    int halves, tile_rows, tile_columns, row_tiles, column_tiles, parts;
};

// Whether the copy engine can bring the operand in as it lies: lines that do not overlap, each from
// a multiple of 16 bytes on.
inline bool is_copied(const Side& side, int k) {
    const bool across = side.k_stride != 1;
    const int64_t stride = across ? side.k_stride : side.row_stride;
    const bool lines = (!across || side.row_stride == 1) && stride >= (across ? side.rows : k);
    return lines && reinterpret_cast<uintptr_t>(side.data) % 16 == 0 && stride % 4 == 0 &&
           side.batch_stride % 4 == 0;
}

inline Form form_of(const Problem& problem) {
    const int rows = problem.a.rows, columns = problem.b.rows;
    Form form = {};
    form.long_is_a = rows > columns;
    const Side& side = form.long_is_a ? problem.a : problem.b;
    form.narrow = min(rows, columns) <= kNarrowRows && problem.k >= kNarrowLeast &&
                  is_copied(side, problem.k);
    form.halves = min(rows, columns) <= 128 ? 1 : 2;
    form.across = side.k_stride != 1;
    const int shorter = 128 * form.halves;
    form.tile_rows = !form.narrow || form.long_is_a ? kTileRows : shorter;
    form.tile_columns = !form.narrow ? kTileColumns : form.long_is_a ? shorter : kLongRows;
    form.row_tiles = tiles_of(rows, form.tile_rows);
    form.column_tiles = tiles_of(columns, form.tile_columns);
    const int64_t tiles = int64_t(problem.batches) * form.row_tiles * form.column_tiles;
    form.parts = parts_of(tiles, problem.k, problem.processors);
    return form;
}

inline bool describe_pieces(CUtensorMap& map, const Factor& f, unsigned box) {
    const cuuint64_t lines = cuuint64_t(f.parts) * f.batches * f.rows, pieces = f.pieces;
    const cuuint64_t size[] = {pieces * 2 * kPiece, lines}, stride[] = {pieces * kPieceBytes};
    const cuuint32_t boxes[] = {2 * kPiece, box};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, f.pairs, size, stride, boxes);
}

// 32 k of 128 rows, or of 32 rows where neighbours are different rows.
inline bool describe_long(CUtensorMap& map, const Factor& f, bool across) {
    const cuuint64_t k = f.k, rows = f.rows, batches = f.batches;
    const cuuint64_t line = (across ? f.k_stride : f.row_stride) * sizeof(float);
    const cuuint64_t batch = batches > 1 ? f.batch_stride * sizeof(float) : line;
    const cuuint64_t size[] = {across ? rows : k, across ? k : rows, batches};
    const cuuint64_t strides[] = {line, batch};
    const cuuint32_t box[] = {32, across ? 32u : kLongRows, 1};
    return describe(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, f.data, size, strides, box);
}

// Hands out memory from `base` on, from nowhere to find out how much it is.
struct Arena {
    char* base;
    int64_t used;
    template <typename T>
    T* take(int64_t count) {
        T* const taken = reinterpret_cast<T*>(base + used);
        used += (count * sizeof(T) + 1023) / 1024 * 1024;
        return taken;
    }
};

struct Work {
    Factor a, b;
    Product product;
};

inline Factor factor_of(const Side& side, const Problem& problem, int parts, bool split,
                        Arena& arena) {
    const int part_k = part_of(problem.k, parts);
    const float* const data = static_cast<const float*>(side.data);
    Factor f = {data,      side.batch_stride, side.row_stride, side.k_stride, problem.batches,
                side.rows, problem.k,         parts,           part_k,        part_k / kPiece};
    if (!split) return f;
    const int64_t lines = int64_t(parts) * f.batches * f.rows;
    f.pairs = arena.take<uint4>(lines * f.pieces * kLines);
    f.heads = arena.take<uint32_t>(lines);
    return f;
}

inline Work work_of(const Problem& problem, const Form& form, Arena& arena) {
    const bool split_a = !form.narrow || !form.long_is_a, split_b = !form.narrow || form.long_is_a;
    const Factor a = factor_of(problem.a, problem, form.parts, split_a, arena);
    const Factor b = factor_of(problem.b, problem, form.parts, split_b, arena);
    Product p = {a.rows,         b.rows,
                 a.pieces,       a.parts * a.batches,
                 form.tile_rows, form.tile_columns,
                 form.row_tiles, form.column_tiles,
                 a.heads,        b.heads};
    p.turned = form.narrow && !form.long_is_a;
    p.triangle = problem.triangle;
    p.diagonal = problem.diagonal;
    p.wide = arena.take<uint8_t>(int64_t(p.row_tiles) * p.column_tiles * p.batches * kWarps);
    const int64_t count = int64_t(p.rows) * p.columns * p.batches;
    p.partial = a.parts > 1 ? arena.take<float>(count) : nullptr;
    return {a, b, p};
}

int64_t workspace_bytes(const Problem& problem) {
    Arena arena = {};
    work_of(problem, form_of(problem), arena);
    return arena.used;
}

template <int kHalves, typename Epilogue>
cudaError_t multiply_narrow(const Epilogue& epilogue, const Work& work, const Form& form,
                            unsigned grid, bool vector, cudaStream_t stream) {
    const Factor& longer = form.long_is_a ? work.a : work.b;
    const Factor& shorter = form.long_is_a ? work.b : work.a;
    CUtensorMap long_map, short_map;
    const bool described = describe_long(long_map, longer, form.across) &&
                           describe_pieces(short_map, shorter, kHalves * 128);
    if (!described) return cudaErrorInvalidValue;
    const auto kernel = narrow_kernel<kHalves, Epilogue>;
    const cudaError_t error = with_shared(kernel, kNarrowShared<kHalves>);
    if (error != cudaSuccess) return error;
    kernel<<<grid, kProductThreads, kNarrowShared<kHalves>, stream>>>(
        long_map, short_map, work.product, epilogue, longer.batches, longer.k, form.across, vector);
    return cudaGetLastError();
}

template <typename Epilogue>
cudaError_t multiply(const Epilogue& epilogue, const Work& work, unsigned grid, bool vector,
                     cudaStream_t stream) {
    CUtensorMap a, b;
    const bool described =
        describe_pieces(a, work.a, kTileRows) && describe_pieces(b, work.b, kTileColumns);
    if (!described) return cudaErrorInvalidValue;
    const auto kernel = product_kernel<Epilogue>;
    const cudaError_t error = with_shared(kernel, kProductShared);
    if (error != cudaSuccess) return error;
    kernel<<<grid, kProductThreads, kProductShared, stream>>>(a, b, work.product, epilogue, vector);
    return cudaGetLastError();
}

template <typename Epilogue>
cudaError_t run_product(const Epilogue& epilogue, const Problem& problem, cudaStream_t stream) {
    const Form form = form_of(problem);
    Arena arena = {static_cast<char*>(problem.workspace), 0};
    const Work work = work_of(problem, form, arena);
    const Product& p = work.product;
    const bool whole = p.columns % 4 == 0 && epilogue.ops.whole != 0;
    const bool vector = p.columns % 4 == 0 && (p.partial || whole);
    const int tiles = p.row_tiles * p.column_tiles * p.batches;
    const unsigned grid = min(problem.processors, tiles);
    cudaError_t error = cudaSuccess;
    if (work.a.pairs) error = split(work.a, stream);
    if (work.b.pairs && error == cudaSuccess) error = split(work.b, stream);
    if (error != cudaSuccess) return error;
    error = !form.narrow       ? multiply(epilogue, work, grid, vector, stream)
            : form.halves == 1 ? multiply_narrow<1>(epilogue, work, form, grid, vector, stream)
                               : multiply_narrow<2>(epilogue, work, form, grid, vector, stream);
    if (error != cudaSuccess) return error;
    const unsigned exact_blocks = problem.processors * kExactBlocks;
    exact_kernel<<<exact_blocks, kExactThreads, 0, stream>>>(work.a, work.b, p, epilogue);
    if (p.partial) {
        const int64_t count = int64_t(p.rows) * p.columns * problem.batches;
        const auto kernel = whole ? add_parts_kernel<4, Epilogue> : add_parts_kernel<1, Epilogue>;
        kernel<<<blocks(whole ? count / 4 : count), kThreads, 0, stream>>>(epilogue, p.partial,
                                                                           form.parts, count);
    }
    return cudaGetLastError();
}
