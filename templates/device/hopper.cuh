// Whether this GPU and this build can: Hopper, a driver that describes tensors to its copy engine,
// and code for sm_90a, without which kernels that need it are empty.
typedef CUresult (*TensorMapEncoder)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found without linking the driver; null where there is none.
TensorMapEncoder tensor_map_encoder() {
    static const TensorMapEncoder found = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &status);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &status);
#endif
        return reinterpret_cast<TensorMapEncoder>(entry);
    }();
    return found;
}

__global__ void is_for_sm90a_kernel(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ int built[1];  // in memory, which the host can ask for
    built[threadIdx.x] = threadIdx.x;
    __syncthreads();
    *out = built[0];
#endif
}

// The multiprocessors of the current GPU, 0 where it cannot.
int hopper_processors() {
    int device = 0, major = 0, minor = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major != 9 || minor != 0 || tensor_map_encoder() == nullptr) return 0;
    static const bool built = [] {
        cudaFuncAttributes attributes;
        const bool known = cudaFuncGetAttributes(&attributes, is_for_sm90a_kernel) == cudaSuccess;
        return known && attributes.sharedSizeBytes > 0;
    }();
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return built ? processors : 0;
}

// Describes a tensor of `rank` dimensions, the innermost first, to the copy engine.
inline bool describe(CUtensorMap& map, CUtensorMapDataType type, int rank, const void* data,
                     const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box) {
    const cuuint32_t steps[3] = {1, 1, 1};
    return tensor_map_encoder()(&map, type, rank, const_cast<void*>(data), size, stride, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename Kernel>
cudaError_t with_shared(Kernel kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
