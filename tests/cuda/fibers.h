// One block of threads as fibers, with their barriers and exchanges. See host.h.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "host.h"
#include "tsan.h"

namespace emulated {

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr unsigned WARP_THREADS = 32, MOST_THREADS = 1024;

[[noreturn]] inline void fault(const char* what) {
    std::fprintf(stderr, "EMULATED FAULT: %s (block %u)\n", what, block.x);
    std::fflush(stderr);
    std::_Exit(86);
}

// Code on the path of every barrier and exchange that does not touch kernel memory is compiled without checks, which
// would make it slower than the kernels.
#define UNWATCHED __attribute__((no_sanitize("address", "undefined")))

// splitmix64 (Steele, Lea, Flood 2014): a few instructions; the standard library's engine took as long as a switch.
class Random {
public:
    using result_type = uint64_t;
    explicit Random(uint64_t seed) : state_(seed) {}
    static constexpr uint64_t min() { return 0; }
    static constexpr uint64_t max() { return ~0ull; }
    UNWATCHED uint64_t operator()() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    UNWATCHED unsigned below(unsigned bound) { return static_cast<unsigned>(((*this)() >> 32) * bound >> 32); }

private:
    uint64_t state_;
};

enum class State { ready, at_block, at_warp, left };

// Stack switch: a few instructions on x86-64; swapcontext would make a system call.
#ifdef __x86_64__
using Context = void*;
extern "C" void switch_stack(void** save, void* to);
asm(R"(
.text
.globl switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;  // aligns the stack as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context = top;
}
inline void switch_to(Context& from, Context& to) { switch_stack(&from, to); }
#else
using Context = ucontext_t;
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

// A thread's asynchronous copies, which land when the thread waits for them and not before.
class Copies {
public:
    void leave() {
        if (!under_way_.empty()) fault("a thread leaves before what it copies is there");
        committed_ = 0;
    }

    // Add a copy. Returns the number under way.
    size_t add(void* target, const void* source, unsigned bytes) {
        std::memset(target, POISON, bytes);
        under_way_.push_back({target, source, bytes, committed_});
        return under_way_.size();
    }

    void commit() { committed_++; }

    void wait(unsigned later) {
        while (!under_way_.empty() && under_way_.front().group + later < committed_) {
            const Copy copy = under_way_.front();
            under_way_.pop_front();
            std::memcpy(copy.target, copy.source, copy.bytes);
        }
    }

private:
    struct Copy {
        void* target;
        const void* source;
        unsigned bytes, group;
    };
    static constexpr int POISON = 0xDB;
    std::deque<Copy> under_way_;
    unsigned committed_ = 0;  // groups
};

struct Fiber {
    Context context;
    char* stack = nullptr;
    void* fake_stack = nullptr;  // the address sanitizer's
    Fences fences;
    Copies copies;
    State state = State::ready;
    int line = 0;  // of the barrier it waits at
    Exchange kind = Exchange::barrier;
    unsigned mask = 0;
    uint64_t value = 0;
    int operand = 0;
};

thread_local Index thread, block, threads, blocks;

class Block {
public:
    explicit Block(uint64_t seed) : random_(seed), seed_(seed) {}

    uint64_t seed() const { return seed_; }
    uint64_t waits() const { return waits_; }  // block barriers passed

    void run(unsigned count, unsigned shared_bytes, const std::function<void()>& kernel) {
        kernel_ = &kernel;
        shared_.reset(new (std::align_val_t(16)) unsigned char[shared_bytes]);
        std::memset(shared_.get(), 0xA5, shared_bytes);
        while (made_ < count) {
            Fiber& fiber = *(fibers_[made_++] = new Fiber);
            fiber.stack = static_cast<char*>(
                mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
            if (fiber.stack == MAP_FAILED) fault("no memory for stacks");
        }
        count_ = count;
        ready_count_ = left_ = waiting_ = 0;
        for (unsigned i = 0; i < count; i++) {
            fibers_[i]->fake_stack = nullptr;
            fibers_[i]->fences.begin();
            prepare(fibers_[i]->context, fibers_[i]->stack, enter);
            make_ready(i);
        }
        caller_bytes_ = 0;
        go_on(caller_, false);
    }

    // The blocks of a grid in execution order.
    std::vector<unsigned> shuffled(unsigned blocks) {
        std::vector<unsigned> order(blocks);
        for (unsigned i = 0; i < blocks; i++) order[i] = i;
        std::shuffle(order.begin(), order.end(), random_);
        return order;
    }

    unsigned char* shared() { return shared_.get(); }

    UNWATCHED int barrier(int value, int line) {
        Fiber& own = *fibers_[current_];
        own.line = line;
        own.value = static_cast<unsigned>(value);
        wait(State::at_block);
        return static_cast<int>(own.value);
    }

    UNWATCHED uint64_t exchange(Exchange kind, unsigned mask, uint64_t value, int operand) {
        Fiber& own = *fibers_[current_];
        own.kind = kind;
        own.mask = mask;
        own.value = value;
        own.operand = operand;
        if (!(mask >> (current_ % WARP_THREADS) & 1))
            fault("a thread takes part in an exchange that its mask leaves out");
        wait(State::at_warp);
        return own.value;
    }

    Fences& fences() { return fibers_[current_]->fences; }
    Copies& copies() { return fibers_[current_]->copies; }

    void copy_later(void* target, const void* source, unsigned bytes) {
        most_copies_ = std::max<uint64_t>(most_copies_, copies().add(target, source, bytes));
    }

    // The most copies that a thread had under way at once since the last call.
    uint64_t take_most_copies() { return std::exchange(most_copies_, 0); }

    // Yield now and then, so that atomic operations interleave.
    UNWATCHED void maybe_yield() {
        if (random_.below(8) == 0) wait(State::ready);
    }

private:
    static void enter();

    // Switch to another ready thread at random, or to the caller of `run` when all threads have left.
    UNWATCHED void go_on(Fiber& own, bool for_good) {
        Fiber* next = &caller_;
        if (left_ < count_) {
            if (ready_count_ == 0) fault("threads wait for others that never come");
            std::swap(ready_[random_.below(ready_count_)], ready_[ready_count_ - 1]);
            thread.x = current_ = ready_[--ready_count_];
            next = fibers_[current_];
            if (next == &own) return;
        }
#ifdef __SANITIZE_ADDRESS__
        const bool back = next == &caller_;
        __sanitizer_start_switch_fiber(
            for_good ? nullptr : &own.fake_stack, back ? caller_stack_ : next->stack, back ? caller_bytes_ : STACK_BYTES);
#else
        static_cast<void>(for_good);
#endif
        switch_to(own.context, next->context);
        arrive(own);
    }

    UNWATCHED void arrive(Fiber& own) {
#ifdef __SANITIZE_ADDRESS__
        const bool first = caller_bytes_ == 0;  // entered from the caller's stack
        __sanitizer_finish_switch_fiber(
            own.fake_stack, first ? &caller_stack_ : nullptr, first ? &caller_bytes_ : nullptr);
#else
        static_cast<void>(own);
#endif
    }

    UNWATCHED void wait(State state) {
        Fiber& own = *fibers_[current_];
        own.state = state;
        if (state == State::ready) make_ready(current_);
        if (state == State::at_block && ++waiting_ + left_ == count_) release_block();
        if (state == State::at_warp) release_warp(own);
        go_on(own, false);
    }

    UNWATCHED void make_ready(unsigned number) {
        fibers_[number]->state = State::ready;
        ready_[ready_count_++] = number;
    }

    UNWATCHED void release_block() {
        if (left_ > 0) fault("threads wait at a barrier of the block that others have left");
        unsigned all = 0;
        for (unsigned i = 0; i < count_; i++) {
            if (fibers_[i]->line != fibers_[0]->line) fault("threads of a block wait at different barriers");
            all |= static_cast<unsigned>(fibers_[i]->value);
        }
        waiting_ = 0;
        waits_++;
        for (unsigned i = 0; i < count_; i++) {
            fibers_[i]->value = all;
            make_ready(i);
        }
    }

    UNWATCHED void release_warp(const Fiber& last) {
        const unsigned first = current_ / WARP_THREADS * WARP_THREADS;
        uint64_t values[WARP_THREADS] = {};
        uint64_t ballot = 0;
        for (unsigned lane = 0; lane < WARP_THREADS; lane++) {
            if (!(last.mask >> lane & 1)) continue;
            if (first + lane >= count_) fault("an exchange waits for threads that the block does not have");
            const Fiber& fiber = *fibers_[first + lane];
            if (fiber.state != State::at_warp) return;
            if (fiber.mask != last.mask || fiber.kind != last.kind || fiber.operand != last.operand)
                fault("threads of a warp meet in different exchanges");
            values[lane] = fiber.value;
            ballot |= static_cast<uint64_t>(fiber.value != 0) << lane;
        }
        for (unsigned lane = 0; lane < WARP_THREADS; lane++) {
            if (!(last.mask >> lane & 1)) continue;
            Fiber& fiber = *fibers_[first + lane];
            const unsigned other = lane ^ static_cast<unsigned>(fiber.operand);
            if (last.kind == Exchange::shuffle_xor && !(last.mask >> other & 1))
                fault("a shuffle reads outside of its mask");
            fiber.value = last.kind == Exchange::ballot ? ballot : values[other % WARP_THREADS];
            make_ready(first + lane);
        }
    }

    Random random_;
    uint64_t seed_, waits_ = 0, most_copies_ = 0;
    const std::function<void()>* kernel_ = nullptr;
    struct Freed {
        void operator()(unsigned char* memory) const { operator delete[](memory, std::align_val_t(16)); }
    };
    std::unique_ptr<unsigned char[], Freed> shared_;
    Fiber* fibers_[MOST_THREADS] = {};  // never freed: the next block reuses them
    Fiber caller_;
    const void* caller_stack_ = nullptr;
    size_t caller_bytes_ = 0;
    unsigned ready_[MOST_THREADS], ready_count_ = 0;
    unsigned made_ = 0, count_ = 0, current_ = 0, left_ = 0, waiting_ = 0;
};

inline thread_local Block* running = nullptr;

WITHOUT_THREAD_SANITIZER inline void Block::enter() {  // never returns
    Block& self = *running;
    Fiber& own = *self.fibers_[self.current_];
    self.arrive(own);
    (*self.kernel_)();
    own.copies.leave();
    own.state = State::left;
    self.left_++;
    if (self.waiting_ > 0 && self.waiting_ + self.left_ == self.count_) self.release_block();
    self.go_on(own, true);
}

inline int injected_fault() {
    static const char* text = std::getenv("PLANTED_FAULT");
    return text == nullptr ? -1 : std::atoi(text);
}
inline unsigned char* shared_memory() { return running->shared(); }
inline int block_barrier(int value, int line) { return running->barrier(value, line); }
inline uint64_t warp_exchange(Exchange kind, unsigned mask, uint64_t value, int operand) {
    return running->exchange(kind, mask, value, operand);
}
inline void maybe_yield() { running->maybe_yield(); }
inline void before_atomic(void* address) { running->fences().before_atomic(address); }
inline void after_atomic(const void* address) { running->fences().after_atomic(address); }
inline void fence() { running->fences().fence(); }
inline void copy_later(void* target, const void* source, unsigned bytes) { running->copy_later(target, source, bytes); }
inline void commit_copies() { running->copies().commit(); }
inline void wait_for_copies(unsigned later) { running->copies().wait(later); }

}  // namespace emulated
