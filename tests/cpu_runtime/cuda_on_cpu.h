// What nvcc would provide: enough of CUDA to run kernels on the host, those too whose threads share
// memory and wait for each other at __syncthreads.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <bit>
#include <stdexcept>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <fibers.h>

#undef __global__
#undef __device__
#undef __host__
#undef __launch_bounds__
#undef __shared__  // cpu.py writes it out
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float sinpif(float x) { return x == rintf(x) ? 0.0f * x : sin(M_PI * remainder(x, 2.0)); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (uint64_t(x) * y) >> 32; }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
template <typename T>
T __ldg(const T* from) {
    return *from;
}

namespace cpu_runtime {

inline cudaError_t last_error = cudaSuccess;
inline jmp_buf* launch = nullptr;  // where a fault in a running kernel returns to
inline char fault[256];
inline int64_t most_shared = 48 << 10;  // of the next launch

[[noreturn]] inline void report(const char* what, const char* file, unsigned line) {
    snprintf(fault, sizeof fault, "%s in a kernel, %s:%u", what, file, line);
    if (fibers != nullptr) fibers->fail();
    if (launch != nullptr) longjmp(*launch, 1);
    fprintf(stderr, "%s\n", fault);
    abort();
}

inline bool allowed(int64_t grid, int64_t threads, int64_t bytes) {
    if (grid <= 0 || grid > INT32_MAX || threads <= 0 || threads > 1024) {
        last_error = cudaErrorInvalidConfiguration;
    } else if (bytes > std::exchange(most_shared, 48 << 10)) {
        last_error = cudaErrorInvalidValue;
    } else {
        return true;
    }
    return false;
}

template <typename... Parameters>
void run_threads(void (*kernel)(Parameters...), unsigned grid, unsigned threads,
                 Parameters... arguments) {
    for (block = {}; block.x < grid; ++block.x) {
        for (thread = {}; thread.x < threads; ++thread.x) kernel(arguments...);
    }
}

// kernel<<<grid, threads, bytes, stream>>>(arguments...) for threads that are independent: a fault
// becomes an exception.
template <typename... Parameters, typename... Arguments>
void launch_threads(void (*kernel)(Parameters...), int64_t grid, int64_t threads, int64_t bytes,
                    Arguments... arguments) {
    if (!allowed(grid, threads, bytes)) return;
    jmp_buf here;
    launch = &here;
    if (setjmp(here) == 0) {
        run_threads<Parameters...>(kernel, grid, threads, arguments...);
        launch = nullptr;
    } else {
        launch = nullptr;
        throw std::runtime_error(fault);
    }
}

// The same for threads that work together, in clusters of so many blocks.
template <typename Kernel, typename... Arguments>
void launch_clusters(unsigned cluster, const Kernel& kernel, int64_t grid, int64_t threads,
                     int64_t bytes, Arguments... arguments) {
    if (!allowed(grid, threads, bytes)) return;
    Block fibers_of_block([&] { kernel(arguments...); }, threads * cluster, bytes, cluster);
    fibers = &fibers_of_block;
    blocks = {unsigned(grid), 1, 1};
    bool right = true;
    for (unsigned first = 0; first < grid && right; first += cluster) {
        thread = {};
        block = {first};
        right = fibers->run();
    }
    fibers = nullptr;
    if (fibers_of_block.complaint != nullptr) throw std::runtime_error(fibers_of_block.complaint);
    if (!right) throw std::runtime_error(fault);
}

template <typename Kernel, typename... Arguments>
void launch_blocks(const Kernel& kernel, int64_t grid, int64_t threads, int64_t bytes,
                   Arguments... arguments) {
    launch_clusters(1, kernel, grid, threads, bytes, arguments...);
}

}  // namespace cpu_runtime

#define blockIdx cpu_runtime::block
#define threadIdx cpu_runtime::thread
inline cpu_runtime::Index& gridDim = cpu_runtime::blocks;  // no macro: launches have members of its name
#define cudaGetLastError() std::exchange(cpu_runtime::last_error, cudaSuccess)

// The handlers of -fsanitize=undefined, so that a finding fails its own test and not the process.
// Each is given the place first: file, line, column.
struct SanitizedPlace {
    const char* file;
    unsigned line, column;
};
#define HANDLER(name, text, ...)                                          \
    extern "C" __attribute__((visibility("hidden"), used)) inline void    \
        __ubsan_handle_##name(SanitizedPlace* place, ##__VA_ARGS__) {     \
        cpu_runtime::report(text, place->file, place->line);              \
    }
HANDLER(type_mismatch_v1, "misaligned or null access", uintptr_t)
HANDLER(out_of_bounds, "array index out of bounds", uintptr_t)
HANDLER(shift_out_of_bounds, "shift out of bounds", uintptr_t, uintptr_t)
HANDLER(add_overflow, "signed overflow", uintptr_t, uintptr_t)
HANDLER(sub_overflow, "signed overflow", uintptr_t, uintptr_t)
HANDLER(mul_overflow, "signed overflow", uintptr_t, uintptr_t)
HANDLER(negate_overflow, "signed overflow", uintptr_t)
HANDLER(divrem_overflow, "division by zero or overflow", uintptr_t, uintptr_t)
HANDLER(load_invalid_value, "load of a value that is no bool or enum", uintptr_t)
#undef HANDLER
