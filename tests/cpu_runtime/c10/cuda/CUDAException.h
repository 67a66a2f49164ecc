#pragma once
#include <c10/util/Exception.h>
#include <driver_types.h>

#define C10_CUDA_CHECK(call)                                                     \
    do {                                                                         \
        const cudaError_t error = call;                                          \
        TORCH_CHECK(error == cudaSuccess, "CUDA error ", static_cast<int>(error)); \
    } while (0)
