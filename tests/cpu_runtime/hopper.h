// What products need of Hopper's tensor cores, on the host: the copy engine with its tensor maps,
// barriers in shared memory, tensor cores that read swizzled shared memory, and clusters of blocks.
//
// Copies are there at once, but a thread that waits for a barrier still waits: an arrival that is
// missing shows as threads that wait for what never comes. A sum of tensor cores is cut off where it
// leaves float32, as theirs is.
#pragma once
#include <cuda.h>
#include <string.h>

#include <stdexcept>
#include <type_traits>

#include <cuda_on_cpu.h>

#undef __grid_constant__
#define __grid_constant__
#define CUDART_VERSION 13000

template <typename A, typename B>
constexpr auto min(A a, B b) {
    using Common = std::common_type_t<A, B>;
    return Common(a) < Common(b) ? Common(a) : Common(b);
}

template <typename A, typename B>
constexpr auto max(A a, B b) {
    using Common = std::common_type_t<A, B>;
    return Common(a) < Common(b) ? Common(b) : Common(a);
}

namespace cpu_runtime {

constexpr int kProcessors = 3;  // so that blocks go through several tiles
constexpr unsigned kSharedStart = 16;
constexpr int kSharedMost = 227 << 10;  // of a block on a Hopper GPU

// What the copy engine is told.
struct Map {
    char* data;
    unsigned rank, element;
    uint64_t size[3], stride[3];  // bytes
    unsigned box[3];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

inline CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data,
                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const bool half =
        type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    Map map = {static_cast<char*>(data), rank, half ? 2u : 4u};
    bool right = rank <= 3 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    right &= swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    for (unsigned d = 0; d < rank && right; ++d) {
        map.size[d] = size[d];
        map.box[d] = box[d];
        map.stride[d] = d == 0 ? map.element : stride[d - 1];
        right &= size[d] >= 1 && size[d] <= uint64_t(1) << 32 && box[d] >= 1 && box[d] <= 256;
        right &= steps[d] == 1 && map.stride[d] < uint64_t(1) << 40;
        right &= d == 0 || (map.stride[d] > 0 && map.stride[d] % 16 == 0);
        right &= d != 1 || map.stride[d] >= size[0] * map.element;  // lines apart
    }
    right &= map.box[0] * map.element == 128;  // a swizzled row
    if (!right) throw std::runtime_error("a tensor map that the driver refuses");
    memcpy(to, &map, sizeof map);
    return CUDA_SUCCESS;
}

// A barrier in shared memory: the phase that is under way, and what it still waits for.
struct Barrier {
    int32_t bytes;
    uint16_t missing, count : 15, phase : 1;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

template <typename Change>
void change(uint64_t* barrier, const Change& how) {
    Barrier now;
    memcpy(&now, barrier, sizeof now);
    how(now);
    if (now.missing == 0 && now.bytes == 0) now.missing = now.count, now.phase ^= 1;
    memcpy(barrier, &now, sizeof now);
}

// Bytes of a row of 128 are moved among those of 8 rows by where the row lies.
inline char* swizzled(unsigned address) {
    address ^= (address >> 7 & 7) << 4;
    return static_cast<char*>(fibers->dynamic_memory()) + address - kSharedStart;
}

inline void copy(void* to, const CUtensorMap& given, const int64_t (&at)[3], uint64_t* barrier);

inline float cut_off(double sum) {
    const float near = sum;
    return fabs(double(near)) > fabs(sum) ? nextafterf(near, 0.0f) : near;
}

inline float to_float(uint16_t half) {
    static const std::vector<float> known = [] {
        std::vector<float> all(1 << 16);
        for (int i = 0; i < 1 << 16; ++i) all[i] = __half2float(__ushort_as_half(i));
        return all;
    }();
    return known[half];
}

// 16 k of a line of what a descriptor describes.
inline void read_line(uint64_t descriptor, int line, float (&to)[16]) {
    const unsigned start = (descriptor & 0x3fff) << 4, step = (descriptor >> 32 & 0x3fff) << 4;
    for (int k = 0; k < 16; k += 8) {
        uint16_t eight[8];
        memcpy(eight, swizzled(start + line / 8 * step + line % 8 * 128 + k * 2), sizeof eight);
        for (int e = 0; e < 8; ++e) to[k + e] = to_float(eight[e]);
    }
}

// The same of one type or the other, where lines may lie across: of each k 64 lines, then as far apart
// as the descriptor says the next 64.
template <typename T, bool kAcross>
void read_halves(uint64_t descriptor, int line, float (&to)[16]) {
    const unsigned start = (descriptor & 0x3fff) << 4, step = (descriptor >> 32 & 0x3fff) << 4;
    const unsigned apart = (descriptor >> 16 & 0x3fff) << 4;
    for (int k = 0; k < 16; ++k) {
        const unsigned along = line / 8 * step + line % 8 * 128 + k * 2;
        const unsigned across = line / 64 * apart + k / 8 * step + k % 8 * 128 + line % 64 * 2;
        uint16_t bits;
        memcpy(&bits, swizzled(start + (kAcross ? across : along)), sizeof bits);
        to[k] =
            std::is_same_v<T, __half> ? to_float(bits) : std::bit_cast<float>(unsigned(bits) << 16);
    }
}

// Each thread has its elements of 64 x 128 or 64 x 256 sums; `row` gives a row of A, `line` one of B.
template <int kCount, typename Row, typename Line>
__attribute__((optimize("O3"))) void multiply(float (&d)[kCount], const Row& row, const Line& line,
                                              bool add) {
    float a[2][16], other[16];
    row(0, a[0]);
    row(1, a[1]);
    for (int j = 0; j < kCount / 2; ++j) {
        line(j / 2 * 8 + thread.x % 4 * 2 + j % 2, other);
        for (int half = 0; half < 2; ++half) {
            float& sum = d[j / 2 * 4 + half * 2 + j % 2];
            double exact = add ? sum : 0.0f;
            for (int k = 0; k < 16; ++k) exact += double(a[half][k]) * other[k];
            sum = cut_off(exact);
        }
    }
}

}  // namespace cpu_runtime

inline unsigned shared_address(const void* at) {
    const char* const base = static_cast<char*>(cpu_runtime::fibers->dynamic_memory());
    return static_cast<const char*>(at) - base + cpu_runtime::kSharedStart;
}

inline void cpu_runtime::copy(void* to, const CUtensorMap& given, const int64_t (&at)[3],
                              uint64_t* barrier) {
    Map map;
    memcpy(&map, &given, sizeof map);
    const unsigned start = shared_address(to), row_elements = map.box[0];
    unsigned rows = 1;
    for (unsigned d = 1; d < map.rank; ++d) rows *= map.box[d];
    for (unsigned row = 0; row < rows; ++row) {
        for (unsigned e = 0; e < row_elements; ++e) {
            const int64_t place[3] = {at[0] + e, at[1] + row % map.box[1], at[2]};
            char* const into = swizzled(start + row * 128 + e * map.element);
            int64_t offset = 0;
            bool inside = true;
            for (unsigned d = 0; d < map.rank; ++d) {
                inside &= place[d] >= 0 && uint64_t(place[d]) < map.size[d];
                offset += place[d] * int64_t(map.stride[d]);
            }
            memset(into, 0, map.element);  // outside
            if (inside) memcpy(into, map.data + offset, map.element);
        }
    }
    change(barrier, [&](Barrier& b) { b.bytes -= rows * 128; });
}

inline void barrier_init(uint64_t* barrier, int count) {
    const cpu_runtime::Barrier made = {0, uint16_t(count), uint16_t(count), 0};
    memcpy(barrier, &made, sizeof made);
}

inline void barrier_expect(uint64_t* barrier, int bytes) {
    cpu_runtime::change(barrier, [&](cpu_runtime::Barrier& b) { b.bytes += bytes, --b.missing; });
}

inline void barrier_arrive(uint64_t* barrier) {
    cpu_runtime::change(barrier, [&](cpu_runtime::Barrier& b) { --b.missing; });
}

inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    for (bool again = false;; again = true) {
        cpu_runtime::Barrier now;
        memcpy(&now, barrier, sizeof now);
        if (now.phase != parity) return;
        cpu_runtime::fibers->look_again(again);
    }
}

inline void copy_pieces(void* to, const CUtensorMap& map, int piece, int row, uint64_t* barrier) {
    cpu_runtime::copy(to, map, {piece * 64, row, 0}, barrier);
}

inline void copy_box(void* to, const CUtensorMap& map, int x, int y, int batch, uint64_t* barrier) {
    cpu_runtime::copy(to, map, {x, y, batch}, barrier);
}

inline void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    const int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const auto row = [&](int half, float (&to)[16]) {
        cpu_runtime::read_line(a, first + half * 8, to);
    };
    const auto line = [&](int number, float (&to)[16]) { cpu_runtime::read_line(b, number, to); };
    cpu_runtime::multiply(d, row, line, add);
}

template <typename T, bool kAcrossA, bool kAcrossB>
void multiply_halves(float (&d)[128], uint64_t a, uint64_t b) {
    const int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const auto row = [&](int half, float (&to)[16]) {
        cpu_runtime::read_halves<T, kAcrossA>(a, first + half * 8, to);
    };
    const auto line = [&](int number, float (&to)[16]) {
        cpu_runtime::read_halves<T, kAcrossB>(b, number, to);
    };
    cpu_runtime::multiply(d, row, line, true);
}

inline void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    struct Registers {
        uint32_t at[4];
    };
    Registers own;
    memcpy(&own, a, sizeof own);
    Registers four[4];
    const int lane = threadIdx.x % 32;
    for (int q = 0; q < 4; ++q) four[q] = __shfl_sync(~0u, own, lane / 4 * 4 + q);
    const auto row = [&](int half, float (&to)[16]) {
        for (int k = 0; k < 16; ++k) {
            const uint32_t two = four[k % 8 / 2].at[k / 8 * 2 + half];
            to[k] = cpu_runtime::to_float(two >> k % 2 * 16);
        }
    };
    const auto line = [&](int number, float (&to)[16]) { cpu_runtime::read_line(b, number, to); };
    cpu_runtime::multiply(d, row, line, add);
}

inline void begin_multiplying() {}
inline void commit_multiplying() {}
inline void finish_multiplying() {}
inline void finish_previous() {}
template <int kCount>
void pin(float (&)[kCount]) {}
inline void cluster_sync() { __syncthreads(); }
inline float larger_of(float x, float y) { return x != x ? x : y != y || y > x ? y : x; }
inline uint32_t __vminu2(uint32_t x, uint32_t y) {
    return min(x & 0xffff, y & 0xffff) | min(x >> 16, y >> 16) << 16;
}
inline uint32_t __vmaxu2(uint32_t x, uint32_t y) {
    return max(x & 0xffff, y & 0xffff) | max(x >> 16, y >> 16) << 16;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    if (selector != 0x7632) throw std::runtime_error("bytes in an order that is not known here");
    return x >> 16 | (y & 0xffff0000);
}
inline int of_block(const int* mine, int block) {
    int value;
    memcpy(&value, cpu_runtime::fibers->other(mine, block), sizeof value);
    return value;
}

// --- the runtime -------------------------------------------------------------------------------

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
             : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                              : cpu_runtime::kProcessors;
    return cudaSuccess;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult*) {
    *entry = reinterpret_cast<void*>(&cpu_runtime::encode);
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
    *attributes = {};
    attributes->sharedSizeBytes = 4;
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
    if (bytes > cpu_runtime::kSharedMost) return cudaErrorInvalidValue;
    cpu_runtime::most_shared = bytes;
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    const unsigned cluster = config->attrs[0].val.clusterDim.x;
    if (cluster > 8 || config->gridDim.x % cluster != 0) return cudaErrorInvalidConfiguration;
    cpu_runtime::launch_clusters(cluster, kernel, config->gridDim.x, config->blockDim.x,
                                 config->dynamicSmemBytes, arguments...);
    return cudaGetLastError();
}
