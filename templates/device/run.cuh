inline unsigned blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// The vector kernel as far as packs are right, the scalar kernel for the rest.
template <int kVec, typename Kernel, typename... Args>
cudaError_t run(Kernel vector, Kernel scalar, const Operands& ops, int count, cudaStream_t stream,
                Args... args) {
    const int64_t packed = allows_packs(ops, count, kVec) ? ops.count - ops.count % kVec : 0;
    const int64_t single = ops.count - packed;
    if (packed) vector<<<blocks(packed / kVec), kThreads, 0, stream>>>(ops, 0, packed, args...);
    if (single) scalar<<<blocks(single), kThreads, 0, stream>>>(ops, packed, ops.count, args...);
    return cudaGetLastError();
}
