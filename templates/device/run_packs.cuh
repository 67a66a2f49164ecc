// As `run`, where each thread takes kPacks packs.
template <int kVec, int kPacks, typename Kernel, typename... Args>
cudaError_t run_packs(Kernel vector, Kernel scalar, const Operands& ops, int count,
                      cudaStream_t stream, Args... args) {
    const int64_t packed = allows_packs(ops, count, kVec) ? ops.count - ops.count % kVec : 0;
    const auto grid = [](int64_t packs) { return blocks((packs + kPacks - 1) / kPacks); };
    const int64_t single = ops.count - packed;
    if (packed) vector<<<grid(packed / kVec), kThreads, 0, stream>>>(ops, 0, packed, args...);
    if (single) scalar<<<grid(single), kThreads, 0, stream>>>(ops, packed, ops.count, args...);
    return cudaGetLastError();
}
