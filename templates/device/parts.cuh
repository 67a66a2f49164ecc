// The parts of a concatenation, done by one launch: its blocks are for each part first those that go
// by packs, then those that take single elements.
template <int kParts>
struct Parts {
    Operands ops[kParts];
    int64_t packed[kParts];  // elements that go by packs
    unsigned blocks[kParts][2];
};

// `roles` are the number of results and of operands of each part.
template <int kVec, int kParts, typename Kernel, typename... Args>
cudaError_t run_parts(Kernel kernel, const Operands (&given)[kParts], const int (&roles)[kParts][2],
                      cudaStream_t stream, Args... args) {
    Parts<kParts> parts = {};
    unsigned total = 0;
    for (int p = 0; p < kParts; ++p) {
        // clang-format off
        const Operands& ops = parts.ops[p] =
            with_packs(given[p], roles[p][0], roles[p][1], kVec);
        // clang-format on
        parts.packed[p] = allows_packs(ops, 0, kVec) ? ops.count - ops.count % kVec : 0;
        parts.blocks[p][0] = blocks(parts.packed[p] / kVec);
        parts.blocks[p][1] = blocks(ops.count - parts.packed[p]);
        total += parts.blocks[p][0] + parts.blocks[p][1];
    }
    if (total) kernel<<<total, kThreads, 0, stream>>>(parts, args...);
    return cudaGetLastError();
}
