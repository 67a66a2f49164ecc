// Blocks whose threads share memory and wait for each other at __syncthreads, or for the others of
// their warp, or for a value in memory. The blocks of a cluster run together, and wait at
// __syncthreads for each other too.
//
// A thread that waits keeps its place on a stack of its own: it runs on a fiber. A fiber that meets
// no barrier goes on with the next thread, so kernels without one cost nothing more. Between two
// barriers threads run one after another, forwards and backwards in turn, and shared memory begins
// as NaN: a barrier that is missing shows in the values.
#pragma once
#include <malloc.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpu_runtime {

struct Index {
    unsigned x, y, z;
};
inline Index block, thread, blocks;

class Block;
inline Block* fibers = nullptr;  // the block that runs, where its threads are fibers

class Block {
  public:
    // `threads` are those of all blocks of the cluster.
    Block(std::function<void()> kernel, unsigned threads, size_t bytes, unsigned cluster = 1)
        : kernel(std::move(kernel)), threads(threads), each(threads / cluster), bytes(bytes) {}

    ~Block() {
        for (const auto& fiber : all) stacks.push_back(std::move(fiber->stack));
    }

    // Runs all threads to their end. False after a fault, whose text `fail` was given.
    bool run() {
        begun = ended = 0;
        variables.clear();
        warps.assign((threads + kWarp - 1) / kWarp, {});
        values.assign(threads, {});
        dynamic = poisoned(bytes);
        while (begun < threads && !faulty) resume(*free_fiber());
        while (!faulty) {
            if (!ready.empty()) {
                std::vector<Fiber*> going;
                going.swap(ready);
                const size_t looked = looking;
                for (size_t i = 0; i < going.size() && !faulty; ++i) resume(*going[i]);
                // Where all that go on only look again, nothing changes any more.
                if (looking - looked == going.size()) {
                    fail_from_outside("threads wait for what never comes");
                }
            } else if (!arrived.empty()) {
                if (ended > 0) {
                    fail_from_outside("threads wait at __syncthreads that others never reach");
                }
                ready.assign(arrived.rbegin(), arrived.rend());
                arrived.clear();
            } else {
                break;
            }
        }
        if (!faulty && ended < threads) fail_from_outside("a warp waits for threads that are gone");
        const char* const end = static_cast<char*>(dynamic.get()) + bytes;
        if (std::any_of(end, end + kSlack, [](char c) { return c != kPoison; })) {
            fail_from_outside("a kernel writes past its shared memory");
        }
        return !faulty;
    }

    void wait() { leave(arrived); }

    // For the other threads of the warp.
    void wait_warp() {
        std::vector<Fiber*>& warp = warps[current->thread / kWarp];
        warp.push_back(current);
        if (warp.size() == std::min(kWarp, threads - current->thread / kWarp * kWarp)) {
            ready.insert(ready.end(), warp.rbegin(), warp.rend());
            warp.clear();
        }
        swap();
    }

    // Until others have gone on, to look at what a thread waits for, which it has done in vain where
    // it does so `again`.
    void look_again(bool again) {
        looking += again;
        leave(ready);
    }

    // What each thread tells others, of 16 bytes at most; `wait` or `wait_warp` before it is read
    // and before it is told anew.
    template <typename T>
    T& told(unsigned by) {
        static_assert(sizeof(T) <= sizeof values[0]);
        return *reinterpret_cast<T*>(&values[by]);
    }

    // Leaves the kernel for good.
    [[noreturn]] void fail() {
        faulty = true;
        setcontext(&caller);
        abort();
    }

    unsigned size() const { return threads; }
    unsigned number() const { return current->thread; }  // of a thread in the cluster

    void* dynamic_memory() { return dynamic.get(); }

    // The memory of one declaration, which `place` stands for.
    void* variable(const void* place, size_t size) {
        auto& memory = variables[{place, block.x}];
        if (!memory) memory = poisoned(size);
        return memory.get();
    }

    // What lies in another block of the cluster where `own` lies in this one.
    const char* other(const void* own, int number) {
        const char* const at = static_cast<const char*>(own);
        for (const auto& [key, memory] : variables) {
            const char* const begin = static_cast<const char*>(memory.get());
            if (key.second != block.x || at < begin || at >= begin + malloc_usable_size(memory.get()))
                continue;
            const unsigned first = block.x / (threads / each) * (threads / each);
            return static_cast<const char*>(variables.at({key.first, first + number}).get()) +
                   (at - begin);
        }
        abort();
    }

    const char* complaint = nullptr;

  private:
    struct Free {
        void operator()(void* memory) const { free(memory); }
    };
    using Memory = std::unique_ptr<void, Free>;
    struct Fiber {
        ucontext_t context;
        Memory stack;
        unsigned thread = 0;
    };
    static constexpr size_t kStack = 64 << 10;
    static constexpr unsigned kWarp = 32;
    static inline std::vector<Memory> stacks;  // that no block uses

    static Memory spare_stack() {
        if (stacks.empty()) return Memory(malloc(kStack));
        Memory last = std::move(stacks.back());
        stacks.pop_back();
        return last;
    }

    // What is written past the end is seen by AddressSanitizer, and without it here.
#ifdef __SANITIZE_ADDRESS__
    static constexpr size_t kSlack = 0;
#else
    static constexpr size_t kSlack = 64 << 10;
#endif
    static constexpr char kPoison = -1;

    static Memory poisoned(size_t size) {
        Memory memory(malloc(size + kSlack));
        memset(memory.get(), kPoison, size + kSlack);
        return memory;
    }

    void leave(std::vector<Fiber*>& to) {
        to.push_back(current);
        swap();
    }

    void swap() {
        Fiber& self = *current;
        swapcontext(&self.context, &caller);
        go_on(self);
    }

    void go_on(const Fiber& fiber) {
        thread.x = fiber.thread % each;
        block.x = block.x / (threads / each) * (threads / each) + fiber.thread / each;
    }

    void fail_from_outside(const char* what) {
        complaint = what;
        faulty = true;
    }

    void resume(Fiber& fiber) {
        current = &fiber;
        swapcontext(&caller, &fiber.context);
    }

    Fiber* free_fiber() {
        if (idle.empty()) {
            all.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *all.back();
            fiber.stack = spare_stack();
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = kStack;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, [] { fibers->go(); }, 0);
            return &fiber;
        }
        Fiber* const last = idle.back();
        idle.pop_back();
        return last;
    }

    // What a fiber does: it begins threads as long as there are some, in every block anew.
    void go() {
        Fiber& self = *current;
        for (;;) {
            while (begun < threads) {
                self.thread = begun++;
                go_on(self);
                kernel();
                ++ended;
            }
            idle.push_back(&self);
            swapcontext(&self.context, &caller);
        }
    }

    struct alignas(16) Value {
        char bytes[16];
    };

    const std::function<void()> kernel;
    const unsigned threads, each;
    const size_t bytes;
    unsigned begun = 0, ended = 0;
    bool faulty = false;
    ucontext_t caller;
    Fiber* current = nullptr;
    std::vector<std::unique_ptr<Fiber>> all;
    std::vector<Fiber*> idle, arrived, ready;
    std::vector<std::vector<Fiber*>> warps;  // that wait for the rest of theirs
    std::vector<Value> values;
    size_t looking = 0;
    Memory dynamic;
    std::map<std::pair<const void*, unsigned>, Memory> variables;
};

}  // namespace cpu_runtime

inline void __syncthreads() { cpu_runtime::fibers->wait(); }
inline void __syncwarp() { cpu_runtime::fibers->wait_warp(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    cpu_runtime::Block& block = *cpu_runtime::fibers;
    block.told<T>(block.number()) = value;
    __syncwarp();
    const T other = block.told<T>(block.number() / 32 * 32 + lane % 32);
    __syncwarp();
    return other;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int apart) {
    return __shfl_sync(mask, value, cpu_runtime::thread.x % 32 ^ apart);
}

inline bool __any_sync(unsigned mask, bool value) {
    for (int apart = 1; apart < 32; apart *= 2) value |= __shfl_xor_sync(mask, value, apart);
    return value;
}

inline int __syncthreads_or(int value) {
    cpu_runtime::Block& block = *cpu_runtime::fibers;
    block.told<int>(block.number()) = value;
    __syncthreads();
    value = 0;
    for (unsigned i = 0; i < block.size(); ++i) value |= block.told<int>(i);
    __syncthreads();
    return value != 0;
}

template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
    return std::exchange(*to, *to + value);
}

template <typename T>
T atomicMax(T* to, std::type_identity_t<T> value) {
    return std::exchange(*to, std::max(*to, value));
}
