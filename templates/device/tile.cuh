// For regions whose results lie otherwise than what they read, as NCHW after a convolution in NHWC.
// A block takes a tile of two dimensions: `columns` along dimension 0, in which results are dense,
// `rows` along dimension 1, in which some inputs are. Those are staged: copied into shared memory
// along the rows, and read from there along the columns. So both sides move whole lines of memory.
//
// A thread has four packs of float under way. A tile of 16 KB of them and 40 to 48 registers
// leave room for five or six blocks a multiprocessor, of which some read while others write.
constexpr int kTileBits = 12;
constexpr int kTile = 1 << kTileBits;  // elements
constexpr int kTileThreads = 256;
constexpr int kSharedBytes = 48 << 10;  // what a block has without asking for more

// The operands of a region: the number of results, which come first, of all, and in bits those
// that the kernel stages where they are dense along the rows.
struct Roles {
    int outputs, count;
    uint64_t staged;
};

struct Tiles {
    // With the dimension of the rows in place 1, and those marked that memory gives by packs: along
    // the rows where they are staged.
    Operands ops;
    Divisor across, along;  // the number of tiles along the rows, which come first, and the columns
    int64_t count;          // of tiles in all
    int column_bits;        // a tile has 2^column_bits columns, and rows to make up kTile
    int bytes;              // of shared memory
    // Small numbers, as all of this is a kernel parameter, for which some compilers have 4 KB.
    int8_t plane[kMaxOperands];  // of a staged operand: its first byte there over kTile, else -1
    int8_t turn[kMaxOperands];   // of a staged operand: see `place`
};

__host__ __device__ constexpr int log2_of(int value) {
    return value > 1 ? 1 + log2_of(value / 2) : 0;
}

struct Cell {
    int row, column;
};

// What of a tile lies inside the tensor; of columns there may be more than it has.
struct Extent {
    int rows, columns;
    __device__ bool holds(Cell cell) const { return cell.row < rows && cell.column < columns; }
};

// Divides `rest` by a size and returns the remainder.
__device__ inline uint32_t take(uint32_t& rest, Divisor size) {
    const uint32_t above = (__umulhi(rest, size.magic) + rest) >> size.shift;
    const uint32_t index = rest - above * size.value;
    rest = above;
    return index;
}

// Where the tile of a block begins in each of the first kCount operands.
template <int kCount>
__device__ inline Extent locate(const Tiles& tiles, int64_t block, uint32_t (&offset)[kCount]) {
    const Operands& ops = tiles.ops;
    uint32_t rest = block;
    const uint32_t row = take(rest, tiles.across) << (kTileBits - tiles.column_bits);
    const uint32_t column = take(rest, tiles.along) << tiles.column_bits;
    for (int o = 0; o < kCount; ++o) {
        offset[o] = row * uint32_t(ops.stride[o][1]) + column * uint32_t(ops.stride[o][0]);
    }
#pragma unroll
    for (int d = 2; d < kOutermost; ++d) {
        if (d + 2 > ops.dims) break;
        const uint32_t index = take(rest, ops.size[d]);
        for (int o = 0; o < kCount; ++o) offset[o] += index * uint32_t(ops.stride[o][d]);
    }
    for (int o = 0; o < kCount; ++o) offset[o] += rest * uint32_t(ops.stride[o][kOutermost]);
    const int rows = kTile >> tiles.column_bits, inside = ops.size[1].value - row;
    return {inside < rows ? inside : rows, int(ops.size[0].value - column)};
}

__device__ inline uint32_t offset_of(const Tiles& tiles, int o, uint32_t offset, Cell cell) {
    const int64_t (&stride)[kMaxDims] = tiles.ops.stride[o];
    return offset + cell.row * uint32_t(stride[1]) + cell.column * uint32_t(stride[0]);
}

// Element `i` of a tile, counted along the columns.
__device__ inline Cell cell_at(const Tiles& tiles, int i) {
    return {i >> tiles.column_bits, i & ((1 << tiles.column_bits) - 1)};
}

// Elements of one row that stay neighbours in shared memory: a pack, or a bank's word at least.
template <typename T, int kVec>
constexpr int kUnit = kVec * sizeof(T) < 4 ? 4 / int(sizeof(T)) : kVec;

// The units that all banks hold side by side, 128 bytes, are 2 to the power of this.
template <typename T, int kVec>
constexpr int kLineBits = log2_of(128 / int(sizeof(T)) / kUnit<T, kVec>);

// Where an element of a staged operand lies in its plane. Written plainly, the rows that a warp
// writes at once would all begin in one bank: so the units of each line are exchanged by XOR with
// the row's number (counted in reads), its bits reversed so that the few columns which the warp
// takes as well, in the low bits, keep banks of their own. For 4 and 2 byte types neither side has
// a bank conflict from 64 columns on; below, writes have two or four at most.
template <typename T, int kVec>
__device__ inline int place(const Tiles& tiles, int o, Cell cell) {
    const uint32_t i = (cell.row << tiles.column_bits) + cell.column;
    return i ^ (__brev(i >> tiles.turn[o]) >> (32 - kLineBits<T, kVec>)) * kUnit<T, kVec>;
}

template <typename T>
__device__ inline T* plane(const Tiles& tiles, int o) {
    extern __shared__ uint4 planes[];
    return reinterpret_cast<T*>(reinterpret_cast<char*>(planes) + tiles.plane[o] * kTile);
}

// Copies what a tile holds of an operand, kRead rows of a column by one access. A warp takes rows
// until they fill the banks, and columns from there on.
template <typename T, int kVec, int kRead>
__device__ inline void copy(const Tiles& tiles, int o, uint32_t offset, Extent extent) {
    constexpr int kReadBits = log2_of(kRead), kMost = kTile / kRead / kTileThreads;
    constexpr int kAhead = kMost < 4 ? kMost : 4;
    const int row_bits = kTileBits - tiles.column_bits - kReadBits;
    const int bits = row_bits < kLineBits<T, kVec> ? row_bits : kLineBits<T, kVec>;
    const int low = threadIdx.x & ((1 << bits) - 1);
    const int turns = ((extent.rows - 1) >> (bits + kReadBits)) + 1;  // of so many rows each
    const int end = turns << (bits + tiles.column_bits);
#pragma unroll 1
    for (int i = threadIdx.x; i < end; i += kAhead * kTileThreads) {
        Cell cells[kAhead];
        Pack<T, kRead> packs[kAhead];  // all are on their way before the first is waited for
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            const Cell high = cell_at(tiles, (i + n * kTileThreads) >> bits);
            cells[n] = {((high.row << bits) + low) * kRead, high.column};
            if (!extent.holds(cells[n])) continue;
            packs[n] = pack_at<T, kRead>(tiles.ops.data[o], offset_of(tiles, o, offset, cells[n]));
        }
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            if (!extent.holds(cells[n])) continue;
            const int first = place<T, kVec>(tiles, o, cells[n]);
#pragma unroll
            for (int r = 0; r < kRead; ++r) {
                plane<T>(tiles, o)[first ^ (r << tiles.column_bits)] = packs[n].at[r];
            }
        }
    }
}

template <typename T, int kVec, int kRead>
__device__ inline void stage(const Tiles& tiles, int o, uint32_t offset, Extent extent) {
    if (tiles.plane[o] < 0) return;
    if (tiles.ops.whole >> o & 1) {
        copy<T, kVec, kRead>(tiles, o, offset, extent);
    } else {
        copy<T, kVec, 1>(tiles, o, offset, extent);
    }
}

template <typename T, int kVec>
__device__ inline Pack<T, kVec> load(const Tiles& tiles, int o, uint32_t offset, Cell cell) {
    return load<T, kVec>(tiles.ops, o, offset_of(tiles, o, offset, cell), kVec, 0);
}

template <typename T, int kVec>
__device__ inline Pack<T, kVec> load_staged(const Tiles& tiles, int o, uint32_t offset, Cell cell) {
    if (tiles.plane[o] < 0) return load<T, kVec>(tiles, o, offset, cell);
    return pack_at<T, kVec>(plane<T>(tiles, o), place<T, kVec>(tiles, o, cell));
}

template <typename T, int kVec>
__device__ inline auto& pack_at(const Tiles& tiles, int o, uint32_t offset, Cell cell) {
    return pack_at<T, kVec>(tiles.ops.data[o], offset_of(tiles, o, offset, cell));
}

// Whether packs along dimension `d` begin on a pack's boundary and are whole.
inline bool allows_packs_along(const Operands& ops, int o, int d, int vec) {
    const auto address = reinterpret_cast<uintptr_t>(ops.data[o]);
    if (ops.stride[o][d] != 1 || address % (vec * ops.bytes[o]) != 0) return false;
    for (int other = 0; other < kMaxDims; ++other) {
        if (other != d && ops.stride[o][other] % vec != 0) return false;
    }
    return ops.size[d].value % vec == 0;
}

// The place of a dimension along which an input is dense that strides along dimension 0, where
// results are dense, and is as large as they are. 0 where tiles would gain nothing.
inline int row_dimension(const Operands& ops, const Roles& roles) {
    if (ops.dims < 2 || ops.size[0].value < 8) return 0;  // a row of 8 floats is a sector
    for (int o = 0; o < roles.outputs; ++o) {
        if (ops.stride[o][0] != 1) return 0;
    }
    for (int o = roles.outputs; o < roles.count; ++o) {
        int dense = 0;
        bool whole = (roles.staged >> o & 1) && ops.stride[o][0] > 1;
        for (int d = 1; d < kMaxDims; ++d) {
            if (ops.stride[o][d] == 1) dense = d;
            if (ops.stride[o][d] == 0 && ops.size[d].value > 1) whole = false;
        }
        if (!whole || dense == 0) continue;
        // Of small images whole ones are near each other, in the first cache, and a tile has one.
        return int64_t(ops.size[0].value) * ops.size[dense].value < kTile / 8 ? 0 : dense;
    }
    return 0;
}

inline uint32_t tiles_over(Divisor size, int bits) { return ((size.value - 1) >> bits) + 1; }

// The shape with the least to do, of equal ones the squarest: 3 channels want 4 rows, 49 pixels 64
// columns. A tile is paid for whether it is full or not, and each of its lines, on either side,
// touches up to a sector of 32 bytes more than it holds.
inline int best_column_bits(const Operands& ops) {
    const int64_t sector = 32 / ops.bytes[0];
    int best = 0;
    int64_t least = INT64_MAX;
    for (int bits : {6, 7, 5, 8, 4, 9, 3, 10}) {
        const int64_t columns = 1 << bits, rows = kTile >> bits;
        const int64_t across = tiles_over(ops.size[1], kTileBits - bits);
        const int64_t work = (columns + sector) * (rows + sector);
        const int64_t cost = across * tiles_over(ops.size[0], bits) * work;
        if (cost < least) {
            least = cost;
            best = bits;
        }
    }
    return best;
}

// Gives shared memory to the operands that are dense along the rows, as far as it goes, and finds
// out which are read by packs.
inline void assign_planes(Tiles& tiles, const Roles& roles, int vec) {
    Operands& ops = tiles.ops;
    for (int o = 0; o < roles.count; ++o) {
        tiles.plane[o] = -1;
        bool packs = allows_packs_along(ops, o, 0, vec);
        const int bytes = kTile * ops.bytes[o];
        const bool across = ops.stride[o][1] == 1 && ops.stride[o][0] > 1;
        if ((roles.staged >> o & 1) && across && tiles.bytes + bytes <= kSharedBytes) {
            tiles.plane[o] = tiles.bytes / kTile;
            tiles.bytes += bytes;
            packs = vec <= kTile >> tiles.column_bits && allows_packs_along(ops, o, 1, vec);
            const int row = tiles.column_bits + (packs ? log2_of(vec) : 0);
            const int line = log2_of(128 / ops.bytes[o]);
            tiles.turn[o] = row > line ? row : line;
        }
        ops.whole |= uint64_t(packs) << o;
    }
}

// How to go over a region by tiles; its count is 0 where that gains nothing.
inline Tiles tiles_of(const Operands& ops, const Roles& roles, int vec) {
    Tiles tiles = {ops};
    const int d = row_dimension(ops, roles);
    if (d == 0) return tiles;
    std::swap(tiles.ops.size[1], tiles.ops.size[d]);
    for (int o = 0; o < roles.count; ++o) std::swap(tiles.ops.stride[o][1], tiles.ops.stride[o][d]);
    tiles.column_bits = best_column_bits(tiles.ops);
    assign_planes(tiles, roles, vec);
    tiles.across = divisor(tiles_over(tiles.ops.size[1], kTileBits - tiles.column_bits));
    tiles.along = divisor(tiles_over(tiles.ops.size[0], tiles.column_bits));
    const int64_t area = int64_t(tiles.ops.size[0].value) * tiles.ops.size[1].value;
    tiles.count = ops.count / area * tiles.across.value * tiles.along.value;
    return tiles;
}

// By tiles where that pays, with packs where results allow them, and as any other region elsewhere.
template <int kVec, typename Tiled, typename Kernel, typename... Args>
cudaError_t run_tiled(Tiled packed, Tiled single, Kernel vector, Kernel scalar, const Operands& ops,
                      const Roles& roles, cudaStream_t stream, Args... args) {
    const Tiles tiles = tiles_of(ops, roles, kVec);
    if (tiles.count == 0) {
        const Operands marked = with_packs(ops, roles.outputs, roles.count, kVec);
        return run<kVec>(vector, scalar, marked, roles.count, stream, args...);
    }
    const uint64_t results = (uint64_t(1) << roles.outputs) - 1;
    const Tiled kernel = (tiles.ops.whole & results) == results ? packed : single;
    kernel<<<tiles.count, kTileThreads, tiles.bytes, stream>>>(tiles, args...);
    return cudaGetLastError();
}
