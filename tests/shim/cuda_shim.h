// Makes the kernels ordinary C++: a block's threads are fibers, run one at a time in a seeded, permuted order between barriers.
//
// A missing barrier lets a fiber read what another has not written yet: shared memory begins as garbage (bytes of 255: NaN, -1),
// the order is another one in every round, and outputs begin as garbage too (the launcher's part). A barrier that not all
// threads of a block or warp come to is an error. Compiled without contraction, each float operation is rounded by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define QK_SHIM
typedef unsigned short qk_u16;
typedef unsigned int qk_u32;

namespace qk_shim {

struct Dim {
    unsigned x, y, z;
};

enum State { RUNS, WAITS_FOR_BLOCK, WAITS_FOR_WARP, DONE };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state;
    Dim thread;
    int number, line; // its own number, and where it waits
    unsigned turn; // of its shuffles: two buffers take turns
    void *fake;
};

struct Block {
    Dim block, grid, size;
    std::vector<Fiber> fibers;
    std::vector<unsigned long long> slots[2];
    std::map<const void *, std::vector<unsigned char>> shared;
    ucontext_t scheduler;
    void *fake;
    const void *bottom;
    size_t room;
    void (*body)(void *);
    void *arguments;
    const char *error;
};

static Block *now;
static Fiber *self;

static void to_scheduler(bool last) {
    Fiber *me = self;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &me->fake, now->bottom, now->room);
#endif
    swapcontext(&me->context, &now->scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(me->fake, &now->bottom, &now->room);
#endif
    (void)last;
}

static void enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &now->bottom, &now->room);
#endif
    now->body(now->arguments);
    self->state = DONE;
    to_scheduler(true);
}

static void run(Fiber &fiber) {
    self = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&now->fake, fiber.stack.data(), fiber.stack.size());
#endif
    swapcontext(&now->scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(now->fake, nullptr, nullptr);
#endif
}

static void wait(State state, int line) {
    self->state = state;
    self->line = line;
    to_scheduler(false);
}

static bool same_line(size_t first, size_t last) {
    for (size_t i = first; i < last; ++i)
        if (now->fibers[i].line != now->fibers[first].line) return false;
    return true;
}

static void *shared(const void *key, size_t bytes) {
    std::vector<unsigned char> &found = now->shared[key];
    if (found.empty()) found.assign(bytes, 255);
    return found.data();
}

template <typename T> T shuffle(T value, int lane, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most eight bytes");
    std::vector<unsigned long long> &slots = now->slots[self->turn++ & 1];
    int first = self->number / 32 * 32;
    memcpy(&slots[self->number], &value, sizeof(T));
    wait(WAITS_FOR_WARP, line);
    T found;
    memcpy(&found, &slots[first + (lane & 31)], sizeof(T));
    return found;
}

// Lets the lanes of a warp go on if all of them wait for each other; false if not. Whoever is missing will never come: an error.
static bool release_warp(size_t first) {
    size_t waiting = 0, last = std::min(first + 32, now->fibers.size());
    bool runs = false;
    for (size_t i = first; i < last; ++i) {
        waiting += now->fibers[i].state == WAITS_FOR_WARP;
        runs |= now->fibers[i].state == RUNS;
    }
    if (runs || !waiting) return false;
    if (waiting != last - first || !same_line(first, last)) {
        now->error = "lanes of a warp wait for others that do not come to the same place";
        return false;
    }
    for (size_t i = first; i < last; ++i) now->fibers[i].state = RUNS;
    return true;
}

static bool release_block() {
    size_t waiting = 0, count = now->fibers.size();
    for (Fiber &fiber : now->fibers) waiting += fiber.state == WAITS_FOR_BLOCK;
    if (!waiting || now->error) return false;
    if (waiting != count || !same_line(0, count)) {
        now->error = "threads of a block wait for others that do not come to the same barrier";
        return false;
    }
    for (Fiber &fiber : now->fibers) fiber.state = RUNS;
    return true;
}

// Runs a warp until its lanes wait for other warps, or are done: it may be far ahead of them, or far behind.
static void run_warp(size_t first, std::mt19937 &random) {
    std::vector<size_t> lanes;
    for (size_t i = first; i < std::min(first + 32, now->fibers.size()); ++i) lanes.push_back(i);
    do {
        for (size_t i = lanes.size(); i > 1; --i) std::swap(lanes[i - 1], lanes[random() % i]);
        for (size_t i : lanes)
            if (now->fibers[i].state == RUNS) run(now->fibers[i]);
    } while (release_warp(first));
}

static void run_block(Block &block, std::mt19937 &random) {
    now = &block;
    int count = (int)(block.size.x * block.size.y * block.size.z);
    block.shared.clear();
    block.slots[0].assign(count + 32, ~0ull);
    block.slots[1].assign(count + 32, ~0ull);
    block.fibers.resize(count);
    for (int i = 0; i < count; ++i) {
        Fiber &fiber = block.fibers[i];
        fiber.stack.resize(1 << 17);
        fiber.state = RUNS;
        fiber.number = i;
        fiber.turn = 0;
        fiber.thread = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<size_t> warps;
    for (size_t first = 0; first < block.fibers.size(); first += 32) warps.push_back(first);
    do {
        for (size_t i = warps.size(); i > 1; --i) std::swap(warps[i - 1], warps[random() % i]);
        for (size_t first : warps) run_warp(first, random);
    } while (release_block());
}

template <typename... A, size_t... I> void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<typename std::remove_reference<A>::type *>(arguments[I])...);
}

template <typename... A> struct Bound {
    void (*kernel)(A...);
    void **arguments;
    static void run(void *self) {
        Bound *bound = static_cast<Bound *>(self);
        call(bound->kernel, bound->arguments, std::index_sequence_for<A...>());
    }
};

// Runs all blocks of a grid; returns what went wrong, or null.
template <typename... A> const char *launch(void (*kernel)(A...), const unsigned *grid, unsigned threads, void **arguments, unsigned seed) {
    std::mt19937 random(seed);
    static Block block; // its stacks are used again
    Bound<A...> bound = {kernel, arguments};
    block.body = Bound<A...>::run;
    block.arguments = &bound;
    block.error = nullptr;
    block.grid = {grid[0], grid[1], 1};
    block.size = {threads, 1, 1};
    for (unsigned y = 0; y < grid[1] && !block.error; ++y)
        for (unsigned x = 0; x < grid[0] && !block.error; ++x) {
            block.block = {x, y, 0};
            run_block(block, random);
        }
    return block.error;
}

} // namespace qk_shim

#define threadIdx (qk_shim::self->thread)
#define blockIdx (qk_shim::now->block)
#define gridDim (qk_shim::now->grid)
#define __syncthreads() qk_shim::wait(qk_shim::WAITS_FOR_BLOCK, __LINE__)
#define __syncwarp() qk_shim::wait(qk_shim::WAITS_FOR_WARP, __LINE__)
#define __shfl_sync(mask, value, lane) qk_shim::shuffle(value, lane, __LINE__)
#define __shfl_xor_sync(mask, value, other) qk_shim::shuffle(value, (qk_shim::self->number & 31) ^ (other), __LINE__)

#define QK_KERNEL extern "C" void
#define QK_INLINE inline
#define QK_DEVICE static inline
#define QK_ROLLED
#define QK_UNROLL
#define QK_BLOCK(threads)
#define QK_INFINITY HUGE_VALF
#define QK_SHARED(type, name, count)                                                                                                       \
    static char name##_key;                                                                                                                \
    type *name = static_cast<type *>(qk_shim::shared(&name##_key, sizeof(type) * (count)))

QK_DEVICE qk_u32 qk_bits(float value) {
    qk_u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
QK_DEVICE float qk_float(qk_u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
QK_DEVICE float qk_root(float value) { return std::sqrt(value); }
QK_DEVICE float qk_from_half(qk_u16 bits) {
    qk_u32 sign = (qk_u32)(bits & 0x8000) << 16, size = bits & 0x7fff;
    if (size >= 0x7c00) return qk_float(sign | 0x7f800000u | (size & 0x3ff) << 13);
    if (size >= 0x400) return qk_float(sign | ((size + 0x1c000u) << 13));
    return qk_float(sign | qk_bits((float)size * 5.9604644775390625e-08f));
}
