// An emulated device in its own process: commands on standard input, replies on standard output, faults on standard
// error. Commands run in order; only requests are answered. A resident kernel runs concurrently on its own threads.
// Compiled after the kernels' source and `run_kernel`, which emulation.py generates.
//
// A command: uint32 kind, uint32 bytes that follow, three uint64.
#include <atomic>
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
    FILL,
    MAP,
    UNMAP,
    LAUNCH,
    LOOP,
    END_LOOP,
    SYNCHRONISE,
    WAITS,
    STAY,
    AWAY,
    HOST,
    COPIES
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

// A launch, which may outlive its command.
struct Launch {
    LaunchHead head;
    std::vector<unsigned char> data;
    std::vector<const void*> arguments;  // each as uint64 bytes, then the bytes in whole words
    std::function<void()> kernel;

    explicit Launch(const Work& work) : data(work.data) {
        std::memcpy(&head, data.data(), sizeof head);
        for (size_t at = sizeof head; at < data.size();) {
            uint64_t bytes;
            std::memcpy(&bytes, data.data() + at, sizeof bytes);
            arguments.push_back(data.data() + at + sizeof bytes);
            at += sizeof bytes + (bytes + 7) / 8 * 8;
        }
        kernel = [this] { run_kernel(head.kernel, arguments.data()); };
    }

    void run(emulated::Block& runner, unsigned number) const {
        emulated::running = &runner;
        emulated::blocks.x = head.blocks;
        emulated::threads.x = head.threads;
        emulated::block.x = number;
        runner.run(head.threads, head.shared_bytes, kernel);
    }
};

// The blocks of a launch, each a thread.
class Threads {
public:
    void start(const Work& work, emulated::Block& block) {
        launch_.reset(new Launch(work));
        const unsigned count = launch_->head.blocks;
        while (runners_.size() < count) runners_.emplace_back(new emulated::Block(runners_.size() + block.seed()));
        left_ = count;
        for (unsigned number : block.shuffled(count))
            started_.emplace_back([this, number] {
                launch_->run(*runners_[number], number);
                left_--;
            });
    }
    bool away() const { return left_ == 0; }
    void join() {
        for (std::thread& thread : started_) thread.join();
        started_.clear();
    }

private:
    std::unique_ptr<Launch> launch_;
    std::vector<std::unique_ptr<emulated::Block>> runners_;
    std::vector<std::thread> started_;
    std::atomic<unsigned> left_{0};
};

Threads& resident() {
    static Threads threads;
    return threads;
}

void launch(const Work& work, emulated::Block& block) {
#ifdef __SANITIZE_THREAD__  // all at once
    static Threads threads;
    threads.start(work, block);
    threads.join();
#else
    const Launch launch(work);
    for (unsigned number : block.shuffled(launch.head.blocks)) launch.run(block, number);
#endif
}

// The host's side of resident blocks, in the device's process, where the sanitizer sees both sides: queries in slots 0 …
// with lines from `lines`; every second one stops after two extends and then continues.
void act_as_host(const Batch& batch, uint32 entries, uint32 slots, const unsigned char* lines) {
    uint32 pushed[RINGS] = {}, seen = 0, done = 0;
    const auto store = [](uint64 address, uint64 index, uint32 value, int order) {
        __atomic_store_n(reinterpret_cast<uint32*>(address) + index, value, order);
    };
    const auto put = [&](uint32 slot, uint32 position, uint32 goal, uint32 is_new) {
        const uint32 ring = slot % RINGS;
        store(batch.goals, slot, goal, __ATOMIC_RELAXED);
        const uint32 entry = (position / entries % MAX_LAP + 1) << LAP_SHIFT | is_new | slot;
        store(batch.rings, ring * entries + position % entries, entry, __ATOMIC_RELEASE);
        pushed[ring]++;
    };
    for (uint32 slot = slots; slot-- > 0;) {  // the first entries last: one block sees all of them, another takes some
        const uint64 at = uint64(slot) * batch.line_bytes;
        std::memcpy(reinterpret_cast<void*>(batch.lines + at), lines + at, batch.line_bytes);
        put(slot, slot / RINGS, slot % 2 ? 2 : ~0u, IS_NEW);
    }
    std::vector<unsigned char> result(batch.result_bytes);
    while (done < slots) {
        const Record* record = reinterpret_cast<const Record*>(batch.records) + seen % entries;
        const uint32 word = __atomic_load_n(&record->slot, __ATOMIC_ACQUIRE), slot = word & ((1u << SLOT_BITS) - 1);
        if (word >> LAP_SHIFT != seen / entries % MAX_LAP + 1) {
            for (uint32 running = 0; running < slots; running += 2) store(batch.goals, running, ~0u, __ATOMIC_RELAXED);
            std::this_thread::yield();
            continue;
        }
        seen++;
        if (record->extends == 0) emulated::fault("a record of no extends");
        if (!(word & IS_DONE)) put(slot, pushed[slot % RINGS], ~0u, 0);
        else done++;
        std::memcpy(result.data(), reinterpret_cast<void*>(batch.results + uint64(slot) * batch.result_bytes),
                    word & IS_DONE ? batch.result_bytes : 0);
    }
    store(batch.doorbell, 0, 1, __ATOMIC_RELAXED);
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
        case FREE_MEMORY:  // waits for all running kernels, as a driver does
            resident().join();
            return std::free(target);
        case WRITE: std::memcpy(target, work.data.data(), work.data.size()); return;
        case READ: return answer(target, order.b);
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
        case STAY:
            resident().join();
            return resident().start(work, block);
        case AWAY: return answer(resident().away());
        case HOST: {
            Batch batch;
            std::memcpy(&batch, work.data.data(), sizeof batch);
            const uint32 slots = static_cast<uint32>(order.b);
            return act_as_host(batch, static_cast<uint32>(order.a), slots, reinterpret_cast<unsigned char*>(order.c));
        }
        case SYNCHRONISE:
            if (order.a) resident().join();
            return answer(0);
        case WAITS: return answer(block.waits());
        case COPIES: return answer(block.take_most_copies());
        default: emulated::fault("an order that there is not");
    }
}

// Run the body of a loop while its condition, a word at `handle`, is not 0.
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
