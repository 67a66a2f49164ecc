// How the tiles of a product's result are handed out. `Tiles` is a product's own struct.
constexpr int kGroup = 16;  // tiles of rows that are under way together, for the cache's sake

inline int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

struct Place {
    int batch, row_tile, column_tile;
    bool matters;
};

// The tiles of a row of them that matter: so many, from the first on.
struct Span {
    int first, count;
};

template <typename Tiles>
__device__ inline Span span_of(const Tiles& p, int row_tile) {
    if (p.triangle == 0) return {0, p.column_tiles};
    const int64_t row = int64_t(row_tile) * p.tile_rows + p.diagonal;
    const int64_t last = row + p.tile_rows - 1;  // what matters of a lower triangle
    const int64_t edge = p.triangle > 0 ? last + p.tile_columns : row;
    const int64_t tile = edge > 0 ? edge / p.tile_columns : 0;
    const int split = min(tile, int64_t(p.column_tiles));
    return p.triangle > 0 ? Span{0, split} : Span{split, p.column_tiles - split};
}

// Of each batch the tiles that matter come first, which spreads them over the multiprocessors.
template <typename Tiles>
__device__ inline Place place_of(const Tiles& p, int tile) {
    const int each = p.row_tiles * p.column_tiles, batch = tile / each;
    int rest = tile % each;
    if (p.triangle == 0) {
        const int first = rest / (kGroup * p.column_tiles) * kGroup;
        const int rows = min(kGroup, p.row_tiles - first), inside = rest - first * p.column_tiles;
        return {batch, first + inside % rows, inside / rows, true};
    }
    for (int row = 0; row < p.row_tiles; ++row) {
        const Span span = span_of(p, row);
        if (rest < span.count) return {batch, row, span.first + rest, true};
        rest -= span.count;
    }
    for (int row = 0; row < p.row_tiles; ++row) {
        const Span span = span_of(p, row);
        const int others = p.column_tiles - span.count;
        if (rest < others) return {batch, row, span.first > 0 ? rest : span.count + rest, false};
        rest -= others;
    }
    return {};
}
