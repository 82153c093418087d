// The life of a job: persistent workers, one call, all tokens.
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "worker.h"

namespace monotape {

class Engine {
 public:
  // Throws when memory or threads run out; whatever was started has ended then.
  Engine(const Model& model, const Kernels& kernels) : shared_(model, kernels) {
    for (int w = 0; w < model.workers; w++) workers_.emplace_back(shared_, w);
    try {
      for (int w = 0; w < model.workers; w++) threads_.emplace_back([this, w] { live(w); });
    } catch (...) {
      end_threads();
      throw;
    }
  }

  ~Engine() {
    cancel();
    end_threads();
  }

  // The job's arrays stay the caller's and must outlive it. False: a job is running already.
  bool start(const Job& job) {
    std::lock_guard lock(mutex_);
    if (busy_) return false;
    shared_.job = job;
    shared_.cancelled = false;
    shared_.finish = Finish::running;
    shared_.fault.kind = 0;
    shared_.rendezvous.reset();
    shared_.sampler.begin(shared_.job);  // may throw; nobody has been woken yet
    published_ = 0;
    start_ns_ = now_ns();
    busy_ = shared_.model.workers;
    jobs_++;
    work_.notify_all();
    return true;
  }

  // Waits until more than `seen` tokens are there, the job has ended, or the time is up.
  Status wait(int seen, int timeout_ms) {
    std::unique_lock lock(mutex_);
    news_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return published_ > seen || !busy_; });
    Status status{};
    status.finish = busy_ ? Finish::running : shared_.finish;
    status.tokens = published_;
    status.start_ns = start_ns_;
    const Fault& fault = shared_.fault;
    if (!busy_ && fault.kind.load()) {
      status.finish = static_cast<Finish>(fault.kind.load());
      status.fault_worker = fault.worker, status.fault_stage = fault.stage;
      status.fault_position = fault.position, status.fault_waited_for = fault.waited_for;
    }
    return status;
  }

  void cancel() { shared_.cancelled = true; }

 private:
  void end_threads() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void live(int index) {
    Worker& worker = workers_[index];
    for (uint64_t seen = 0;;) {
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return closing_ || jobs_ > seen; });
        if (jobs_ == seen) return;  // a job that has started is played by all, or the others would wait in vain
        seen = jobs_;
      }
      shared_.job.kind == JobKind::generate ? generate(worker, index) : all_logits(worker, index);
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) news_.notify_all();
    }
  }

  // The whole request: prefill in chunks, then one token after another. Every worker runs this loop; worker 0 chooses
  // and publishes, and all meet again so that everybody has seen the choice.
  void generate(Worker& worker, int index) {
    const Job& job = shared_.job;
    int position = job.cached, last_row = 0;
    while (position < job.prompt_length) {
      const Rows rows = prompt_rows(position);
      if (!worker.forward(rows)) return;
      position += rows.count;
      last_row = rows.count - 1;
      if (index == 0 && shared_.cancelled) shared_.finish = Finish::cancelled;
      if (!worker.meet(Stage::head) || shared_.finish != Finish::running) return;
    }
    for (int produced = 0;; produced++, position++, last_row = 0) {
      if (!worker.head(last_row, shared_.logits.data())) return;
      if (index == 0) choose(position, produced);
      if (!worker.meet(Stage::head) || shared_.finish != Finish::running) return;
      const int32_t token = shared_.next_token;
      if (!worker.forward({&token, 1, position})) return;
    }
  }

  void choose(int position, int produced) {
    const Job& job = shared_.job;
    const int32_t token = shared_.sampler.choose(shared_.logits.data(), position, produced);
    if (token < 0) return raise_numerical_fault(position);
    shared_.next_token = token;
    job.ids[produced] = token;
    job.times_ns[produced] = now_ns();
    bool stop = false;
    for (int i = 0; i < job.stop_count; i++) stop |= job.stop_ids[i] == token;
    if (stop) shared_.finish = Finish::stop;
    else if (produced + 1 == job.max_tokens) shared_.finish = Finish::length;
    else if (shared_.cancelled) shared_.finish = Finish::cancelled;
    {
      std::lock_guard lock(mutex_);
      published_ = produced + 1;
    }
    news_.notify_all();
  }

  void raise_numerical_fault(int position) {
    shared_.fault.worker = 0, shared_.fault.stage = static_cast<int>(Stage::head);
    shared_.fault.position = position, shared_.fault.waited_for = -1;
    shared_.finish = Finish::numerical_fault;
    shared_.fault.kind = static_cast<int>(Finish::numerical_fault);
  }

  // Logits after every token of the prompt: for scoring text and for tests.
  void all_logits(Worker& worker, int index) {
    const Job& job = shared_.job;
    const int vocab = shared_.model.vocab;
    for (int position = job.cached; position < job.prompt_length;) {
      const Rows rows = prompt_rows(position);
      if (!worker.forward(rows)) return;
      for (int r = 0; r < rows.count; r++) {
        if (!worker.head(r, shared_.logits.data())) return;
        float* out = job.logits + static_cast<size_t>(position + r - job.cached) * vocab;
        if (index == 0) {
          std::memcpy(out, shared_.logits.data(), sizeof(float) * vocab);
          if (shared_.cancelled) shared_.finish = Finish::cancelled;
        }
        if (!worker.meet(Stage::head) || shared_.finish != Finish::running) return;
      }
      position += rows.count;
    }
    if (index == 0) shared_.finish = Finish::length;
  }

  Rows prompt_rows(int position) const {
    const Job& job = shared_.job;
    return {job.prompt + position, std::min(shared_.model.chunk, job.prompt_length - position), position};
  }

  Shared shared_;
  std::vector<Worker> workers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable work_, news_;
  uint64_t jobs_ = 0;
  int busy_ = 0;       // workers that have not finished the job
  int published_ = 0;  // tokens
  int64_t start_ns_ = 0;
  bool closing_ = false;
};

}  // namespace monotape

// The C interface that bridge.py calls.
extern "C" {

using monotape::Engine;

int32_t monotape_size_of(int32_t which) {
  const size_t sizes[] = {sizeof(monotape::Span), sizeof(monotape::Model), sizeof(monotape::Sampling),
                          sizeof(monotape::Job), sizeof(monotape::Status)};
  return static_cast<int32_t>(sizes[which]);
}

// The name of the kernels that `isa` asks for ("": the best ones); null when this machine has none of that name.
const char* monotape_isa(const char* isa) {
  const monotape::Kernels* kernels = monotape::choose_kernels(isa);
  return kernels ? kernels->name : nullptr;
}

Engine* monotape_open(const monotape::Model* model, const char* isa) {
  const monotape::Kernels* kernels = monotape::choose_kernels(isa);
  try {
    return kernels ? new Engine(*model, *kernels) : nullptr;
  } catch (const std::exception&) {  // no memory, or no more threads: Python says so
    return nullptr;
  }
}
void monotape_close(Engine* engine) { delete engine; }
// 1: started; 0: busy; -1: out of memory.
int32_t monotape_start(Engine* engine, const monotape::Job* job) {
  try {
    return engine->start(*job);
  } catch (const std::exception&) {
    return -1;
  }
}
void monotape_cancel(Engine* engine) { engine->cancel(); }
void monotape_wait(Engine* engine, int32_t seen, int32_t timeout_ms, monotape::Status* status) {
  *status = engine->wait(seen, timeout_ms);
}

}  // extern "C"
