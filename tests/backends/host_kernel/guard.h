// Memory between guard pages, and the handler of accesses to them: a fault that is reported, not a crash.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

namespace host {

class GuardedMemory {
 public:
  GuardedMemory() = default;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() {
    if (map_) munmap(map_, length_);
  }

  // It ends where a page ends, so `bytes` must be a multiple of the alignment that is wanted.
  void take(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), inside = (bytes + page - 1) / page * page;
    length_ = inside + 2 * page;
    void* map = mmap(nullptr, length_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) abort();
    map_ = static_cast<unsigned char*>(map);
    if (mprotect(map_ + page, inside, PROT_READ | PROT_WRITE)) abort();
    start_ = map_ + page + inside - bytes;
  }
  unsigned char* get() const { return start_; }

 private:
  unsigned char *map_ = nullptr, *start_ = nullptr;
  size_t length_ = 0;
};

// While it lives, bad accesses of this process are told to `tell`, which jumps away, or says whether to make the access
// again. Otherwise the program ends as it would have.
class FaultCatcher {
 public:
  using Tell = bool (*)(const void* at, bool misaligned);
  explicit FaultCatcher(Tell tell) {
    told() = tell;
    stack_t stack = {};
    stack.ss_sp = stack_, stack.ss_size = sizeof(stack_);
    sigaltstack(&stack, &stack_before_);
    struct sigaction action = {};
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // it is left by a jump
    for (int i = 0; i < 2; i++) sigaction(kSignals[i], &action, &before_[i]);
  }
  FaultCatcher(const FaultCatcher&) = delete;
  FaultCatcher& operator=(const FaultCatcher&) = delete;
  ~FaultCatcher() {
    for (int i = 0; i < 2; i++) sigaction(kSignals[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  static constexpr int kSignals[2] = {SIGSEGV, SIGBUS};
  static Tell& told() {
    static Tell tell = nullptr;
    return tell;
  }
  static void caught(int signal_number, siginfo_t* info, void*) {
    // An x86 that refuses a vector at a crooked address does not say which, only that it was no page's fault.
    if (told()(info->si_addr, info->si_code == SI_KERNEL)) return;
    signal(signal_number, SIG_DFL);  // the access is made again
  }

  stack_t stack_before_ = {};
  struct sigaction before_[2];
  alignas(16) char stack_[64 << 10];
};

}  // namespace host
