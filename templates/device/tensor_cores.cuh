// What kernels on Hopper's tensor cores share: barriers, copies, and the instructions around those that
// multiply.
__device__ inline uint32_t shared_address(const void* at) { return __cvta_generic_to_shared(at); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ inline void barrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(count));
}

__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nwait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\nbra wait;\ndone:\n}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// A box of a tensor of three dimensions, as large as its map says.
__device__ inline void copy_box(void* to, const CUtensorMap& map, int x, int y, int batch,
                                uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(batch), "r"(shared_address(barrier))
        : "memory");
}

// Rows of 128 bytes, 8 of them swizzled in a KB.
__device__ inline uint64_t matrix_descriptor(const void* at) {
    const uint64_t address = shared_address(at) >> 4, step = 1024 >> 4, swizzle128 = 1;
    return address | step << 32 | swizzle128 << 62;
}

__device__ inline void begin_multiplying() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void commit_multiplying() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ inline void finish_multiplying() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps the compiler from moving what it does with these across the asynchronous instructions.
template <int kCount>
__device__ inline void pin(float (&d)[kCount]) {
#pragma unroll
    for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}
#endif
