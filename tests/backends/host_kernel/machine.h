// A GPU of one host thread: every CUDA thread is a fiber, and a random number generator says which one runs next.
//
// Fibers yield wherever they wait or touch shared data. Effects that real hardware may delay are delayed here: stores become
// visible to others after a random time, bulk copies land in pieces, thread blocks stall. All of it follows from the seed.
// Time is counted in steps, one fiber's turn each; when no fiber can run it jumps to the next event.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include "dies.h"
#include "guard.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <queue>
#include <string>
#include <vector>

// For functions of a few instructions. At -O1 the compiler would call them, and divide by a constant at run time.
#define MONOTAPE_INLINE __attribute__((always_inline)) inline

namespace host {

struct Options {  // host_kernel.py: OptionsStruct
  uint64_t seed;
  int64_t cancel_at, most_steps;  // when the host asks the kernel to stop (-1: never), and when to give up
  int stalls_per_million;         // turns after which a fiber, or all of its block, rests for long
  int stall_steps;                // the longest such rest
  int delay_steps;                // the longest time until a store is seen by others
  int copy_steps;                 // the longest time that a bulk copy takes
  int favour_steps;               // how long some blocks are favoured over others, and one of them rests; 0: all are equal
  int dies;                       // parts with an L2 of their own, of a GPU that has such parts
  int line_steps;                 // turns, on average, between two lines of an L2 that are written back and fetched; 0: none are
  int spare;
};

constexpr int kLanes = MONOTAPE_LANES, kWarpsOfBlock = 12, kThreadsOfBlock = kLanes * kWarpsOfBlock;
constexpr int kStackBytes = (64 << 10) + 4160;  // not a power of two: the tops would share a few lines of the cache
constexpr int kVisitSteps = 2000;
constexpr int kLongestNap = 16384;  // steps between two looks of a fiber that polls

struct AsyncWord {
  void* to;
  const void* from;
  uint32_t bytes;
  int group;
};

struct AsyncProduct {  // hopper.h: begin_product
  float (*sums)[4];
  bool add;
  const unsigned char *first, *second;
  int tiles, half, group;
  float rows[2][16];  // of the first operand, where that is null
  bool float16;
};

#ifdef __clang__  // has the other way on some machines only
using Place = jmp_buf;
#define MONOTAPE_MARK(place) _setjmp(place)
#define MONOTAPE_JUMP(place) _longjmp(place, 1)
#else  // no call of the C library, and three words instead of 25
using Place = void* [5];
#define MONOTAPE_MARK(place) __builtin_setjmp(place)
#define MONOTAPE_JUMP(place) __builtin_longjmp(place, 1)
#endif

struct Fiber {
  Place place;
  bool started = false, ended = false, agreed = false;
  int block, thread, polls = 0, collectives = 0;
  const char* doing = "starting";
  const void *watched[3] = {};  // what it looked at last, without doing anything else since
  uint32_t seen = 0;            // there, where it is a count
  int copy_group = 0;
  std::vector<AsyncWord> copies;
  int product_group = 0;
  std::vector<AsyncProduct> products;
  unsigned warp() const { return thread / kLanes; }
  int lane() const { return thread % kLanes; }
};

enum class Collective { none, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, sync, multiply };

struct Warp {
  int arrived = 0;
  Collective kind = Collective::none;
  uint64_t value[2][kLanes];  // two, used in turn: a fiber that is ahead does not overwrite values that others have yet to read
  uint32_t operand[2][kLanes][6];
  float result[2][kLanes][4];
  int integers[2][kLanes][4];  // the same, of bytes
};

struct Meeting {
  int arrived = 0, expected = 0;
  bool good = true;
  std::vector<Fiber*> waiting;
};

struct Store {  // on its way to where others see it
  uint64_t time;
  uint32_t* at;
  uint32_t value[4];
  unsigned parts;  // bit i: part i is in it
  int thread;
  bool met, met_warp;  // the block, or the warp, has met since: a fence of any of them covers it
  bool released;       // to the block, whose other warps have yet to acquire it
};

struct Block {
  Warp warp[kWarpsOfBlock];
  Meeting meeting[2];
  std::vector<Store> stores;
  GuardedMemory memory;
  std::map<const void*, uint64_t> l1;  // of a machine whose loads it may serve
  uint32_t header_memory[4] = {7, 11, 13, 17};  // shared memory of the machine's header, not cleared
  std::vector<Fiber*> watching;                 // fibers that wait for a change of it
};

// When a block's fibers run. `pick` reads it at every step; a Block is 50 KB, and these few bytes of each stay in the cache.
struct Turns {
  uint64_t stalled_until = 0;
  int rank = 0;
};

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  uint32_t bytes;
  uint64_t* barrier;
};

class Machine;
extern Machine* machine;

class Machine {
 public:
  Machine(int blocks, size_t shared_bytes, const Options& options)
      : options(options), random_(options.seed * 0x9E3779B97F4A7C15ull + 1), blocks_(blocks), turns_of_(blocks),
        fibers_(blocks * kThreadsOfBlock), stacks_(static_cast<size_t>(blocks) * kThreadsOfBlock * kStackBytes) {
    for (Block& block : blocks_) {
      block.memory.take(shared_bytes);
      for (size_t i = 0; i < shared_bytes; i++) block.memory.get()[i] = static_cast<unsigned char>(random());
    }
    for (size_t i = 0; i < fibers_.size(); i++) {
      fibers_[i].block = static_cast<int>(i) / kThreadsOfBlock, fibers_[i].thread = static_cast<int>(i) % kThreadsOfBlock;
      ready_.push_back(static_cast<uint32_t>(i));
    }
  }

  const Options options;
  Fiber* current = nullptr;
  void (*body)() = nullptr;
  void (*enter)(Fiber&) = nullptr;  // tells the kernel whose turn it is
  uint32_t* cancel_flag = nullptr;
  void (*visit)(int64_t) = nullptr;  // the host's work beside the kernel, now and then; it learns the time
  Dies* dies = nullptr;
  int64_t crossings = 0;  // words that were loaded from where all dies see them
  std::string fault;

  MONOTAPE_INLINE uint64_t random() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return random_ * 0x2545F4914F6CDD1Dull >> 16;
  }
  // `random() % n`. A division of 64-bit integers takes 40 cycles and more; of numbers below 2^48, the integer part of a
  // quotient in double precision is exact, because the distance to the next integer is at least 1 / n.
  MONOTAPE_INLINE uint64_t random_below(uint64_t n) {
    const uint64_t value = random();
    if (__builtin_constant_p(n)) return value % n;
    const double quotient = static_cast<double>(static_cast<int64_t>(value)) / static_cast<double>(static_cast<int64_t>(n));
    return value - static_cast<uint64_t>(static_cast<int64_t>(quotient)) * n;
  }
  MONOTAPE_INLINE int below(int n) { return n > 0 ? static_cast<int>(random_below(static_cast<unsigned>(n))) : 0; }
  MONOTAPE_INLINE bool once_in(int n) { return below(n) == 0; }
  uint64_t now() const { return now_; }
  uint64_t turns() const { return turns_; }
  Block& block() { return blocks_[current->block]; }
  unsigned char* shared_memory(int block) { return blocks_[block].memory.get(); }

  // Runs all fibers to the end; the fault says what went wrong.
  void run() {
    const FaultCatcher catcher([](const void* at, bool misaligned) { return machine->stray(at, misaligned); });
    size_t ended = 0;
    while (ended < fibers_.size() && fault.empty()) {
      happen();
      if (ready_.empty()) {
        if (!jump()) describe("Nobody can go on");
        continue;
      }
      Fiber& fiber = pick();
      if (const uint64_t until = turns_of_[fiber.block].stalled_until; until > now_) {
        sleep_until(fiber, until);
        continue;
      }
      now_++;
      if (static_cast<int64_t>(++turns_) > options.most_steps) describe("It takes too long");
      resume(fiber);
      ended += fiber.ended;
    }
    while (fault.empty() && !copies_.empty()) fault = "A block ended under a copy.";
    for (Block& block : blocks_) flush(block, [](const Store&) { return true; });
    if (dies) dies->release_all();
  }

  // A fiber has touched what is not the kernel's, or writes a page of its die: called by a signal handler. True if the access
  // is to be made again; false if it was not a fiber's.
  bool stray(const void* at, bool misaligned) {
    if (!misaligned && dies && dies->written(at)) return true;
    if (!in_fiber_) return false;
    if (misaligned) fail("A misaligned access");
    char text[64];
    snprintf(text, sizeof(text), "An access outside of all memory, at %p", dies ? dies->past_cache(at) : at);
    fail(text);
    return false;
  }
  // Words that will be moved later, when no fiber can be blamed any more.
  void touch(const void* at, size_t bytes, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(at) % alignment) fail("A misaligned access");
    const volatile unsigned char* byte = static_cast<const volatile unsigned char*>(at);
    if (bytes) static_cast<void>(byte[0]), static_cast<void>(byte[bytes - 1]);
  }

  void fail(const std::string& what) {
    fault = what + " (block " + std::to_string(current->block) + ", thread " + std::to_string(current->thread) + ")";
    leave();
  }

  // The current fiber goes on later: soon, after some steps, or when another fiber calls `wake`.
  void yield() {
    if (options.stalls_per_million && below(1000000) < options.stalls_per_million) {
      const uint64_t until = now_ + 1 + below(options.stall_steps);
      if (once_in(4)) turns_of_[current->block].stalled_until = until;
      sleep_until(*current, until);
    } else {
      wake(*current);
    }
    leave();
  }
  void sleep(int steps) {
    sleep_until(*current, now_ + 1 + below(steps));
    leave();
  }
  // A woken fiber may sleep on for a while: others are then long past the barrier.
  void oversleep() {
    if (options.stalls_per_million && below(4000000) < options.stalls_per_million) sleep(options.stall_steps);
  }
  void wait(const char* what) {
    current->doing = what;
    leave();
    current->doing = "running";
  }
  void wake(Fiber& fiber) { ready_.push_back(static_cast<uint32_t>(&fiber - fibers_.data())); }
  void wake_warp(int block, unsigned warp, int but_lane) {
    for (int lane = 0; lane < kLanes; lane++)
      if (lane != but_lane) wake(fibers_[block * kThreadsOfBlock + warp * kLanes + lane]);
  }

  // After a look at something that others change.
  void saw(bool what_it_wanted, const char* what) {
    if (what_it_wanted) {
      current->polls = 0;
      if (once_in(16)) yield();
      return;
    }
    current->doing = what;
    const int nap = 1 << (current->polls < 14 ? current->polls : 14);
    current->polls++;
    sleep(nap < kLongestNap ? nap : kLongestNap);
    current->doing = "running";
  }
  void did_something() { current->polls = 0, current->watched[0] = current->watched[1] = current->watched[2] = nullptr; }
  // A read of a plain flag: a fiber that reads the same few flags again and again is polling.
  void looked_at(const void* flag) {
    Fiber& f = *current;
    if (flag == f.watched[0] || flag == f.watched[1] || flag == f.watched[2]) return saw(false, "watching a flag");
    f.watched[2] = f.watched[1], f.watched[1] = f.watched[0], f.watched[0] = flag;
    if (once_in(8)) yield();
  }

  void store(uint32_t* at, const uint32_t* value, unsigned parts) {
    did_something();
    touch(at, parts == 15 ? 16 : parts == 3 ? 8 : 4, parts == 15 ? 16 : parts == 3 ? 8 : 4);
    Block& b = block();
    const bool torn = parts == 15 && once_in(4);  // a 16-byte store need not become visible at once
    for (int i = 0; i < (torn ? 4 : 1); i++) {
      Store s = {now_ + below(options.delay_steps), at, {0, 0, 0, 0}, torn ? 1u << i : parts, current->thread, false, false, false};
      for (int part = 0; part < 4; part++)
        if (s.parts >> part & 1) s.value[part] = value[part];
      for (const Store& before : b.stores)
        if (before.at == at && before.time > s.time) s.time = before.time;
      b.stores.push_back(s);
      arrivals_.push({s.time, current->block});
    }
    if (once_in(16)) yield();
  }
  // A thread's load of a word comes after its own store to it.
  void settle(const uint32_t* at) {
    Block& b = block();
    bool own = false;
    for (const Store& s : b.stores) own |= s.at == at && s.thread == current->thread;
    if (own) flush(b, [at](const Store& s) { return s.at == at; });
  }
  // Everything that is before a fence of the current thread becomes visible.
  void fence() {
    const int thread = current->thread;
    flush(block(), [thread](const Store& s) {
      return s.thread == thread || s.met || (s.met_warp && s.thread / kLanes == thread / kLanes);
    });
  }
  void stores_met(int block, int warp) {  // warp -1: all of the block
    for (Store& s : blocks_[block].stores) {
      if (warp < 0) s.met = true;
      else if (s.thread / kLanes == warp) s.met_warp = true;
    }
  }

  // A fence of a warp waits for all stores of the warp.
  void release_to_block() {
    for (Store& s : block().stores) s.released |= s.thread / kLanes == current->thread / kLanes;
  }
  void acquire_in_block() {
    for (Store& s : block().stores) s.met |= s.released;
  }

  void copy(const Copy& all) {
    did_something();
    touch(all.from, all.bytes, 16);
    memset(all.to, 0xff, all.bytes);  // from now on the memory is the copy's
    const uint32_t words = all.bytes / 16;
    uint32_t done = 0;
    while (done < words) {
      const uint32_t more = once_in(3) ? words - done : 1 + static_cast<uint32_t>(below(static_cast<int>(words - done)));
      copies_.push({now_ + 1 + below(options.copy_steps), {all.to + done * 16, all.from + done * 16, more * 16, all.barrier}});
      done += more;
    }
  }
  void (*landed)(uint64_t* barrier, uint32_t bytes) = nullptr;

 private:
  struct Nap {
    uint64_t until, order;
    Fiber* fiber;
    bool operator<(const Nap& other) const { return until != other.until ? until > other.until : order > other.order; }
  };
  struct Arrival {
    uint64_t time;
    int block;
    bool operator<(const Arrival& other) const { return time != other.time ? time > other.time : block > other.block; }
  };
  struct Landing {
    uint64_t time;
    Copy copy;
    bool operator<(const Landing& other) const { return time != other.time ? time > other.time : copy.to > other.copy.to; }
  };

  void sleep_until(Fiber& fiber, uint64_t until) { naps_.push({until, order_++, &fiber}); }

  void happen() {
    while (!arrivals_.empty() && arrivals_.top().time <= now_) {
      const uint64_t time = now_;
      flush(blocks_[arrivals_.top().block], [time](const Store& s) { return s.time <= time; });
      arrivals_.pop();
    }
    while (!copies_.empty() && copies_.top().time <= now_) {
      const Copy c = copies_.top().copy;
      copies_.pop();
      memcpy(c.to, c.from, c.bytes);
      landed(c.barrier, c.bytes);
    }
    while (!naps_.empty() && naps_.top().until <= now_) {
      wake(*naps_.top().fiber);
      naps_.pop();
    }
    if (visit && now_ >= next_visit_) {
      next_visit_ = now_ + kVisitSteps;
      visit(static_cast<int64_t>(now_));
    }
    if (dies && options.line_steps && once_in(options.line_steps)) dies->turn_over(random());
    if (options.cancel_at >= 0 && static_cast<int64_t>(turns_) >= options.cancel_at) *cancel_flag = 1;
  }
  bool jump() {
    uint64_t next = ~0ull;
    if (!naps_.empty()) next = naps_.top().until;
    if (!copies_.empty() && copies_.top().time < next) next = copies_.top().time;
    if (!arrivals_.empty() && arrivals_.top().time < next) next = arrivals_.top().time;
    if (next == ~0ull) return false;
    now_ = next > now_ ? next : now_ + 1;
    return true;
  }
  // Now and then all fibers have the same chance; in between the one that became ready last runs, so that a warp runs far
  // ahead of the others. (It is also what a cache likes best.)
  Fiber& pick() {
    if (now_ >= next_mood_) {
      fair_ = once_in(8);
      next_mood_ = now_ + 1 + below(fair_ ? 2000 : 20000);
    }
    const size_t some = fair_ || ready_.size() < kLanes || once_in(64) ? ready_.size() : kLanes;
    size_t at = ready_.size() - 1 - random_below(some);
    if (options.favour_steps) {
      if (now_ >= next_ranks_) {
        for (Turns& turns : turns_of_) turns.rank = below(1000);
        next_ranks_ = now_ + 1 + below(options.favour_steps);
        turns_of_[below(static_cast<int>(turns_of_.size()))].stalled_until = next_ranks_;
      }
      for (int i = 0; i < 3; i++) {
        const size_t other = random_below(ready_.size());
        if (rank_of(ready_[other]) > rank_of(ready_[at])) at = other;
      }
    }
    Fiber& fiber = fibers_[ready_[at]];
    ready_[at] = ready_.back();
    ready_.pop_back();
    return fiber;
  }
  int rank_of(uint32_t fiber) const { return turns_of_[fiber / kThreadsOfBlock].rank; }

  template <class Which>
  void flush(Block& b, Which which) {
    size_t kept = 0;
    for (size_t i = 0; i < b.stores.size(); i++) {
      const Store& s = b.stores[i];
      if (!which(s)) {
        b.stores[kept++] = s;
        continue;
      }
      for (int part = 0; part < 4; part++)
        if (s.parts >> part & 1) s.at[part] = s.value[part];
      if (dies) dies->changed(s.at);
    }
    b.stores.resize(kept);
  }

  // What all fibers are doing: for each block, the first lanes of its warps that still run.
  void describe(const char* what) {
    fault = std::string(what) + ".";
    for (size_t block = 0; block < blocks_.size(); block++) {
      fault += " Block " + std::to_string(block) + ":";
      std::string before;
      for (int thread = 0; thread < kThreadsOfBlock; thread++) {
        const Fiber& f = fibers_[block * kThreadsOfBlock + thread];
        const std::string doing = f.ended ? "ended" : f.doing;
        if (doing != before) fault += " " + std::to_string(thread) + " " + doing + ",";
        before = doing;
      }
    }
  }

  // Switching takes no system call: a context is only made to begin a fiber on its own stack. GCC drops the
  // code behind a __builtin_setjmp in a function that itself contains a __builtin_longjmp, so the jump has its own function.
  [[noreturn]] __attribute__((noinline)) static void go_to(Place& place) { MONOTAPE_JUMP(place); }
  __attribute__((noinline)) void leave() {
    if (!MONOTAPE_MARK(current->place)) go_to(scheduler_);
  }
  __attribute__((noinline)) void resume(Fiber& fiber) {
    current = &fiber;
    enter(fiber);
    if (MONOTAPE_MARK(scheduler_)) {
      in_fiber_ = false;
      return;
    }
    in_fiber_ = true;
    if (fiber.started) go_to(fiber.place);
    begin(fiber);
  }
  void begin(Fiber& fiber) {
    fiber.started = true, fiber.doing = "running";
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_.get() + (&fiber - fibers_.data()) * static_cast<size_t>(kStackBytes);
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
  }

 public:
  [[noreturn]] void end() {
    if (!current->copies.empty()) fail("A thread ended before its copies");
    if (!current->products.empty()) fail("A thread ended before its products");
    current->ended = true, current->doing = "ended";
    go_to(scheduler_);
  }

 private:
  struct Stacks {  // not touched until they are used
    explicit Stacks(size_t bytes) : memory(static_cast<char*>(malloc(bytes))) {}
    ~Stacks() { free(memory); }
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    char* get() const { return memory; }
    char* memory;
  };

  uint64_t random_, now_ = 0, turns_ = 0, order_ = 0, next_ranks_ = 0, next_mood_ = 0, next_visit_ = 0;
  bool fair_ = false, in_fiber_ = false;
  std::vector<Block> blocks_;
  std::vector<Turns> turns_of_;  // of the blocks
  std::vector<Fiber> fibers_;
  Stacks stacks_;
  std::vector<uint32_t> ready_;  // which of the fibers
  std::priority_queue<Nap> naps_;
  std::priority_queue<Arrival> arrivals_;
  std::priority_queue<Landing> copies_;
  Place scheduler_;
};

}  // namespace host
