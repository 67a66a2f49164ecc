// Neighbouring elements, moved by one aligned access.
template <typename T, int kVec>
struct alignas(kVec * sizeof(T)) Pack {
    T at[kVec];
};

template <typename T, int kVec>
__device__ inline auto& pack_at(void* data, int64_t offset) {
    return *reinterpret_cast<Pack<T, kVec>*>(static_cast<T*>(data) + offset);
}
