// Blocks whose threads share memory and wait for each other at __syncthreads.
//
// A thread that waits keeps its place on a stack of its own: it runs on a fiber. A fiber that meets
// no barrier goes on with the next thread, so kernels without one cost nothing more. Between two
// barriers threads run one after another, forwards and backwards in turn, and shared memory begins
// as NaN: a barrier that is missing shows in the values.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace cpu_runtime {

struct Index {
    unsigned x, y, z;
};
inline Index block, thread;

class Block;
inline Block* fibers = nullptr;  // the block that runs, where its threads are fibers

class Block {
  public:
    Block(std::function<void()> kernel, unsigned threads, size_t bytes)
        : kernel(std::move(kernel)), threads(threads), bytes(bytes) {}

    ~Block() {
        for (const auto& fiber : all) stacks.push_back(std::move(fiber->stack));
    }

    // Runs all threads to their end. False after a fault, whose text `fail` was given.
    bool run() {
        begun = ended = 0;
        variables.clear();
        dynamic = poisoned(bytes);
        while (begun < threads && !faulty) resume(*free_fiber());
        while (!arrived.empty() && !faulty) {
            if (ended > 0) fail_from_outside("threads wait at __syncthreads that others never reach");
            std::vector<Fiber*> waiting(arrived.rbegin(), arrived.rend());
            arrived.clear();
            for (size_t i = 0; i < waiting.size() && !faulty; ++i) resume(*waiting[i]);
        }
        const char* const end = static_cast<char*>(dynamic.get()) + bytes;
        if (std::any_of(end, end + kSlack, [](char c) { return c != kPoison; })) {
            fail_from_outside("a kernel writes past its shared memory");
        }
        return !faulty;
    }

    void wait() {
        Fiber& self = *current;
        arrived.push_back(&self);
        swapcontext(&self.context, &caller);
        thread.x = self.thread;
    }

    // Leaves the kernel for good.
    [[noreturn]] void fail() {
        faulty = true;
        setcontext(&caller);
        abort();
    }

    void* dynamic_memory() { return dynamic.get(); }

    // The memory of one declaration, which `place` stands for.
    void* variable(const void* place, size_t size) {
        auto& memory = variables[place];
        if (!memory) memory = poisoned(size);
        return memory.get();
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
                thread.x = self.thread = begun++;
                kernel();
                ++ended;
            }
            idle.push_back(&self);
            swapcontext(&self.context, &caller);
        }
    }

    const std::function<void()> kernel;
    const unsigned threads;
    const size_t bytes;
    unsigned begun = 0, ended = 0;
    bool faulty = false;
    ucontext_t caller;
    Fiber* current = nullptr;
    std::vector<std::unique_ptr<Fiber>> all;
    std::vector<Fiber*> idle, arrived;
    Memory dynamic;
    std::map<const void*, Memory> variables;
};

}  // namespace cpu_runtime

inline void __syncthreads() { cpu_runtime::fibers->wait(); }
