// The kernels' effect on a running batch, without searching, for the stub driver: a query is done after STUB_CUDA_EXTENDS
// extends and finds the rows 0, 1, 2 … at these distances. A launch makes the extends of its kernels' limit, or
// ends when a query is done, after STUB_CUDA_TURN_US: the wait for the device's other processes.
#include "layout.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace {

Batch batch;
uintptr_t write_slots, merge;
unsigned limit = 1;  // extends of a launch
unsigned turn_us = std::getenv("STUB_CUDA_TURN_US") ? std::atoi(std::getenv("STUB_CUDA_TURN_US")) : 0;
unsigned slots;  // slots ever written to
unsigned extends_made;
unsigned extends_of_a_query = std::getenv("STUB_CUDA_EXTENDS") ? std::atoi(std::getenv("STUB_CUDA_EXTENDS")) : 1;

template <typename T>
T* at(uint64 address, uint64 bytes = 0) {
    return reinterpret_cast<T*>(address + bytes);
}

// Make an extend of a slot. Returns whether its query is done.
bool extend(unsigned number, Slot* slot) {
    Result* result = at<Result>(batch.results, uint64(number) * batch.result_bytes);
    result->extends = ++slot->extends;
    if (slot->extends < extends_of_a_query) return false;
    int* nodes = reinterpret_cast<int*>(result + 1);
    float* distances = reinterpret_cast<float*>(nodes + batch.max_k);
    for (unsigned i = 0; i < slot->k; i++) nodes[i] = i, distances[i] = i;
    slot->status = FINISHED;
    result->ticket = slot->ticket;
    return true;
}

}  // namespace

extern "C" {

void stub_kernel(uintptr_t function, const char* name) {
    if (!std::strcmp(name, "write_slots")) write_slots = function;
    if (!std::strcmp(name, "merge_and_gather")) merge = function;
}

void stub_launched(uintptr_t function, unsigned grid, void** arguments) {
    batch = *static_cast<const Batch*>(arguments[0]);  // the first argument of every kernel
    if (function == merge) limit = *static_cast<const unsigned*>(arguments[1]);
    if (function != write_slots) return;
    const Command* command = at<const Command>(*static_cast<const uint64*>(arguments[1]));
    for (unsigned i = 0; i < grid; i++, command++) {
        Slot* slot = at<Slot>(batch.slots, uint64(command->slot) * batch.line_bytes);
        if (command->line) std::memcpy(slot, at<void>(command->line), batch.line_bytes);
        if (command->line || command->status == FREE || slot->status != FINISHED) slot->status = command->status;
        if (command->slot >= slots) slots = command->slot + 1;
    }
}

void stub_replayed() {
    Progress* progress = at<Progress>(batch.progress);
    if (turn_us) usleep(turn_us);
    bool active = true, done = false;
    for (unsigned made = 0; made < limit && active && !done; made++) {
        active = false;
        for (unsigned i = 0; i < slots; i++) {
            Slot* slot = at<Slot>(batch.slots, uint64(i) * batch.line_bytes);
            if (slot->status == ACTIVE) active = true, done |= extend(i, slot);
        }
        extends_made++;
    }
    progress->extends = extends_made;
    __atomic_store_n(&progress->launches, progress->launches + 1, __ATOMIC_RELEASE);
}
}
