// Runs the kernel on the pseudo-GPU, from its first instruction to the last of all threads.
#include MONOTAPE_KERNEL

#undef memory

Index threadIdx, blockIdx;
unsigned char (*host_memory)[];
host::Machine* host::machine;

namespace {

const monotape::Params* const* params;  // one a rank that runs
int told_rank;  // whose parameters are in constant memory

void body() {
  monotape_request();
  host::machine->end();
}

void enter(host::Fiber& fiber) {
  threadIdx.x = static_cast<unsigned>(fiber.thread), blockIdx.x = static_cast<unsigned>(fiber.block % monotape::kWorkers);
  host_memory = reinterpret_cast<unsigned char(*)[]>(host::machine->shared_memory(fiber.block));
  const int rank = fiber.block / monotape::kWorkers;
  if (rank != told_rank) monotape::request = *params[told_rank = rank];
}

void landed(uint64_t* barrier, uint32_t bytes) { monotape::change_barrier(barrier, 0, -static_cast<int>(bytes)); }

}  // namespace

// Null: all fibers have come to the end; else what went wrong. `steps` is how many turns that took. Ranks are launches that
// run at the same time, on blocks of their own.
extern "C" const char* run_on_host(const void* const* parameters, int ranks, int64_t bytes, int workers,
                                   const host::Options* options, int64_t* steps) {
  static std::string fault;
  if (bytes != sizeof(monotape::Params)) return "The parameters are laid out otherwise.";
  if (workers != monotape::kWorkers) return "The kernel was built for another number of workers.";
  params = reinterpret_cast<const monotape::Params* const*>(parameters);
  host::Machine machine(ranks * workers, sizeof(monotape::Shared), *options);
  host::machine = &machine;
  told_rank = -1;
  machine.body = body, machine.enter = enter, machine.landed = landed;
  machine.cancel_flag = &params[0]->status->cancel;
  machine.run();
  *steps = static_cast<int64_t>(machine.turns());
  fault = machine.fault;
  return fault.empty() ? nullptr : fault.c_str();
}
