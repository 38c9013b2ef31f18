// Annotations of a thread's fences for the thread sanitizer, which does not model fences, nor that a relaxed atomic
// operation between two fences orders accesses before the first and after the second. Empty in other builds.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <vector>

#include <sanitizer/tsan_interface.h>

#define WITHOUT_THREAD_SANITIZER __attribute__((no_sanitize("thread")))

namespace emulated {

// Two sanitizer contexts besides the thread's own act as clocks: one of accesses before the thread's last fence, which
// every later atomic operation releases; one of accesses acquired by atomic operations, which the next fence adopts.
class Fences {
public:
    void begin() { seen_.clear(); }

    void before_atomic(void* address) {
        if (fenced_ != nullptr) in(fenced_, [=] { __tsan_release(address); });
    }

    void after_atomic(const void* address) { seen_.push_back(const_cast<void*>(address)); }

    void fence() {
        for (void* address : seen_) __tsan_acquire(address);
        seen_.clear();
        if (fenced_ == nullptr) fenced_ = __tsan_create_fiber(0);
        __tsan_release(this);
        in(fenced_, [this] { __tsan_acquire(this); });
    }

private:
    template <class Act>
    static void in(void* context, Act act) {
        void* own = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync);
        act();
        __tsan_switch_to_fiber(own, __tsan_switch_to_fiber_no_sync);
    }

    void* fenced_ = nullptr;
    std::vector<void*> seen_;  // words of atomic operations since the last fence
};

}  // namespace emulated

#else

#define WITHOUT_THREAD_SANITIZER

namespace emulated {

struct Fences {
    void begin() {}
    void before_atomic(void*) {}
    void after_atomic(const void*) {}
    void fence() {}
};

}  // namespace emulated

#endif
