// A device in a process of its own: orders come on standard input, answers go to standard output, faults to standard
// error. Orders are carried out one after another; only those that ask for something are answered. Behind the kernels'
// text and `run_kernel`, which emulation.py writes.
//
// An order: uint32 kind, uint32 bytes that follow, three uint64.
#include <cinttypes>
#include <string>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

namespace {

enum Kind : uint32_t {
    ALLOCATE,
    FREE_MEMORY,
    WRITE,
    READ,
    COPY,
    FILL,
    MAP,
    UNMAP,
    LAUNCH,
    LOOP,
    END_LOOP,
    SYNCHRONISE,
    WAITS
};

struct Order {
    uint32_t kind, bytes;
    uint64_t a, b, c;
};

struct Work {
    Order order;
    std::vector<unsigned char> data;
};

struct LaunchHead {
    uint32_t kernel, blocks, threads, shared_bytes;
};

bool read_all(void* target, size_t bytes) { return bytes == 0 || std::fread(target, 1, bytes, stdin) == bytes; }

void answer(const void* source, size_t bytes) {
    std::fwrite(source, 1, bytes, stdout);
    std::fflush(stdout);
}

void answer(uint64_t value) { answer(&value, sizeof value); }

bool next(Work& work) {
    if (!read_all(&work.order, sizeof work.order)) return false;
    work.data.resize(work.order.bytes);
    return read_all(work.data.data(), work.data.size());
}

void launch(const Work& work, emulated::Block& block) {
    LaunchHead head;
    std::memcpy(&head, work.data.data(), sizeof head);
    std::vector<const void*> arguments;  // each as uint64 bytes, then the bytes in whole words
    for (size_t at = sizeof head; at < work.data.size();) {
        uint64_t bytes;
        std::memcpy(&bytes, work.data.data() + at, sizeof bytes);
        arguments.push_back(work.data.data() + at + sizeof bytes);
        at += sizeof bytes + (bytes + 7) / 8 * 8;
    }
    const std::function<void()> kernel = [&] { run_kernel(head.kernel, arguments.data()); };
    const auto run = [&](emulated::Block& runner, unsigned number) {
        emulated::running = &runner;
        emulated::blocks.x = head.blocks;
        emulated::threads.x = head.threads;
        emulated::block.x = number;
        runner.run(head.threads, head.shared_bytes, kernel);
    };
#ifdef __SANITIZE_THREAD__  // all at once
    static std::vector<std::unique_ptr<emulated::Block>> runners;
    while (runners.size() < head.blocks) runners.emplace_back(new emulated::Block(runners.size() + block.seed()));
    std::vector<std::thread> started;
    for (unsigned number : block.shuffled(head.blocks))
        started.emplace_back([&, number] { run(*runners[number], number); });
    for (std::thread& thread : started) thread.join();
#else
    for (unsigned number : block.shuffled(head.blocks)) run(block, number);
#endif
}

void carry_out(const Work& work, emulated::Block& block) {
    const Order& order = work.order;
    void* target = reinterpret_cast<void*>(order.a);
    switch (order.kind) {
        case ALLOCATE: {
            void* memory = nullptr;
            if (posix_memalign(&memory, 256, order.a) != 0) emulated::fault("no memory");
            std::memset(memory, 0xA5, order.a);
            return answer(reinterpret_cast<uint64_t>(memory));
        }
        case FREE_MEMORY: return std::free(target);
        case WRITE: std::memcpy(target, work.data.data(), work.data.size()); return;
        case READ: return answer(target, order.b);
        case COPY: std::memmove(target, reinterpret_cast<void*>(order.b), order.c); return;
        case FILL: std::fill_n(static_cast<uint32_t*>(target), order.c, static_cast<uint32_t>(order.b)); return;
        case MAP: {
            const std::string path(work.data.begin(), work.data.end());
            const int file = open(path.c_str(), O_RDWR);
            void* memory = mmap(nullptr, order.a, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            close(file);
            return answer(memory == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(memory));
        }
        case UNMAP: munmap(target, order.b); return;
        case LAUNCH: return launch(work, block);
        case SYNCHRONISE: return answer(0);
        case WAITS: return answer(block.waits());
        default: emulated::fault("an order that there is not");
    }
}

// Carry out the body of a loop while its condition, a word at `handle`, is not 0.
void loop(uint64_t handle, emulated::Block& block) {
    std::vector<Work> body;
    for (Work work; next(work) && work.order.kind != END_LOOP;) body.push_back(work);
    volatile uint32_t* condition = reinterpret_cast<volatile uint32_t*>(handle);
    for (*condition = 1; *condition != 0;)
        for (const Work& work : body) carry_out(work, block);
}

}  // namespace

int main(int, char** arguments) {
    emulated::Block block(std::strtoull(arguments[1], nullptr, 10));
    for (Work work; next(work);)
        if (work.order.kind == LOOP)
            loop(work.order.a, block);
        else
            carry_out(work, block);
    std::_Exit(0);
}
