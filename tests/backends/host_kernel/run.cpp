// Runs the kernel on the pseudo-GPU, from its first instruction to the last of all threads.
#include MONOTAPE_KERNEL

#undef memory

Index threadIdx, blockIdx;
unsigned char (*host_memory)[];
host::Machine* host::machine;

namespace {

std::vector<monotape::Params> params;  // of each rank that runs, as each of its dies sees memory
int dies_of_rank, told;                // whose parameters are in constant memory

void body() {
  monotape_request();
  host::machine->end();
}

void enter(host::Fiber& fiber) {
  threadIdx.x = static_cast<unsigned>(fiber.thread), blockIdx.x = static_cast<unsigned>(fiber.block % monotape::kWorkers);
  host_memory = reinterpret_cast<unsigned char(*)[]>(host::machine->shared_memory(fiber.block));
  const int die = fiber.block / monotape::kWorkers * dies_of_rank + static_cast<int>(blockIdx.x) % dies_of_rank;
  if (die != told) monotape::request = params[told = die];
  if (host::machine->dies) host::machine->dies->current = die;
}

// Pointers of the parameters, for a die's own addresses: any word that is an address of the GPU's memory is one.
monotape::Params seen_by(const host::Dies& dies, int die, monotape::Params from) {
  uint64_t words[sizeof(from) / 8];
  memcpy(words, &from, sizeof(words));
  for (uint64_t& word : words) word = dies.seen_by(die, word);
  memcpy(&from, words, sizeof(words));
  return from;
}

void landed(uint64_t* barrier, uint32_t bytes) { monotape::change_barrier(barrier, 0, -static_cast<int>(bytes)); }

}  // namespace

// Null: all fibers have come to the end; else what went wrong. `counts`: how many turns that took, and how many words crossed dies. Ranks are launches that
// run at the same time, on blocks of their own.
extern "C" const char* run_on_host(const void* const* parameters, int ranks, int64_t bytes, int workers,
                                   const host::Options* options, const host::Region* regions, int region_count, int64_t* counts,
                                   void (*visit)(int64_t)) {
  static std::string fault;
  if (bytes != sizeof(monotape::Params)) return "The parameters are laid out otherwise.";
  if (workers != monotape::kWorkers) return "The kernel was built for another number of workers.";
  dies_of_rank = MONOTAPE_DIES > 1 ? std::min(options->dies, workers) : 1;
  std::unique_ptr<host::Dies> dies;
  if (MONOTAPE_DIES > 1) dies = std::make_unique<host::Dies>(ranks * dies_of_rank, regions, region_count);
  params.clear();
  for (int die = 0; die < ranks * dies_of_rank; die++) {
    const monotape::Params& given = *static_cast<const monotape::Params*>(parameters[die / dies_of_rank]);
    params.push_back(dies ? seen_by(*dies, die, given) : given);
  }
  host::Machine machine(ranks * workers, sizeof(monotape::Shared), *options);
  host::machine = &machine;
  machine.dies = dies.get();
  told = -1;
  machine.body = body, machine.enter = enter, machine.landed = landed;
  machine.visit = visit;
  machine.cancel_flag = &params[0].status->cancel;
  machine.run();
  counts[0] = static_cast<int64_t>(machine.turns()), counts[1] = machine.crossings;
  fault = machine.fault;
  return fault.empty() ? nullptr : fault.c_str();
}
