// The life of a job: persistent workers, one call, all tokens.
#include <algorithm>
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
  // One model a rank; `group` is null where there is one. Throws when memory or threads run out; whatever was started
  // has ended then.
  Engine(const Model* models, const Group* group, const Kernels& kernels) {
    const int ranks = group ? group->ranks : 1;
    const Model& first = models[0];
    Patience patience{};
    patience.deadline_us = first.deadline_us;
    if (group) {
      // Words that rank 0 may be ahead of others: one a chunk, and those of the last two decisions.
      const size_t controls = (first.context + first.chunk - 1) / first.chunk + 2 * (kPassTokens + 1);
      collective_.reset(new Collective(*group, first.chunk, round_up(first.width, kTileRows), controls, first.deadline_us));
      // With more threads than cores, a spinning worker keeps the worker that it waits for off the core.
      if (ranks * first.workers > static_cast<int>(std::thread::hardware_concurrency())) patience.spins = 16;
    }
    for (int r = 0; r < ranks; r++) {
      ranks_.emplace_back(new Shared(models[r], kernels, collective_.get(), patience, fault_));
      for (int other = 0; group && other < ranks; other++) ranks_[r]->first_words.push_back(models[other].first_word);
      if (group) ranks_[r]->first_words.push_back(group->vocab);
      for (int w = 0; w < first.workers; w++) workers_.emplace_back(*ranks_[r], w);
    }
    try {
      for (size_t w = 0; w < workers_.size(); w++) threads_.emplace_back([this, w] { live(workers_[w]); });
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
    fault_.cancelled = false;
    fault_.kind = 0;
    uint32_t tag = 0;
    for (const Worker& worker : workers_) tag = std::max(tag, worker.latest_tag());
    if (tag > kLateTag) {  // numbers must not wrap around while old words remain in the inboxes
      collective_->forget();
      tag = 0;
    }
    for (Worker& worker : workers_) worker.begin_job(tag);
    for (auto& rank : ranks_) {
      rank->job = job;
      rank->keys = job.keys[rank->model.rank], rank->values = job.values[rank->model.rank];
      rank->finish = Finish::running;
      rank->decision = {};
      rank->filled = job.cached;
      rank->rendezvous.reset();
    }
    first().chooser.begin(first().job);  // may throw; no worker has been woken yet
    published_ = kept_ = 0;
    start_ns_ = now_ns();
    busy_ = static_cast<int>(workers_.size());
    jobs_++;
    work_.notify_all();
    return true;
  }

  // Waits until more than `seen` tokens are there, the job has ended, or the time is up.
  Status wait(int seen, int timeout_ms) {
    std::unique_lock lock(mutex_);
    news_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return published_ > seen || !busy_; });
    Status status{};
    status.finish = busy_ ? Finish::running : first().finish;
    status.tokens = published_;
    status.filled = kept_ ? kept_ : first().filled.load();
    for (auto& rank : ranks_)  // each has heads of its own
      if (!kept_) status.filled = std::min(status.filled, rank->filled.load());
    status.start_ns = start_ns_;
    if (!busy_) status.drafted = first().chooser.drafted(), status.accepted = first().chooser.accepted();
    // A job that had ended by itself when the cancellation came has not been cancelled.
    const bool late = fault_.kind.load() == static_cast<int>(Finish::cancelled) && status.finish != Finish::running;
    if (!busy_ && fault_.kind.load() && !late) {
      status.finish = static_cast<Finish>(fault_.kind.load());
      status.fault_worker = fault_.worker, status.fault_stage = fault_.stage;
      status.fault_position = fault_.position, status.fault_waited_for = fault_.waited_for;
      status.fault_rank = fault_.rank, status.fault_waited_rank = fault_.waited_rank;
    }
    return status;
  }

  void cancel() {
    fault_.cancelled = true;
    masks().wake();
  }

  // Of the running job.
  Masks& masks() { return first().chooser.masks(); }

  // For tests and experiments, between jobs.
  void cancel_at(int64_t look) { fault_.cancel_at = look; }
  int64_t looks() const {
    int64_t most = 0;
    for (const Worker& worker : workers_) most = std::max(most, worker.looks());
    return most;
  }
  // What the gate takes a pass alone and one with drafts to last, and how long the last job waited for masks.
  void pass_times(int64_t* ns) {
    Chooser& chooser = first().chooser;
    ns[0] = chooser.gate().ns_alone(), ns[1] = chooser.gate().ns_with_drafts(), ns[2] = masks().waited_ns();
  }
  void check_all_drafts(bool all) { first().chooser.gate().stay_open(all); }
  void delay_words(int64_t longest_ns, uint64_t seed) {
    if (collective_) collective_->link_delay.set(longest_ns, seed);
  }
  void stop_rank(int rank, int after_modules, int64_t deadline_us) {
    if (!collective_) return;
    for (int r = 0; r < collective_->ranks(); r++)
      collective_->deadlines_us[r] = r == rank ? deadline_us : first().model.deadline_us;
    collective_->stopped_after = after_modules;
    collective_->stopped_rank = rank;
  }

 private:
  void end_threads() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void live(Worker& worker) {
    for (uint64_t seen = 0;;) {
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return closing_ || jobs_ > seen; });
        if (jobs_ == seen) return;  // all workers run a job that has started, or the others would wait in vain
        seen = jobs_;
      }
      first().job.kind == JobKind::generate ? generate(worker) : all_logits(worker);
      std::lock_guard lock(mutex_);
      if (--busy_) continue;
      masks().end_job();
      news_.notify_all();
    }
  }

  // The whole request: prefill in chunks, then one token after another, or several where drafts are right. Every worker runs
  // this loop; worker 0 of rank 0 chooses and publishes, and all settle on it.
  void generate(Worker& worker) {
    Shared& shared = worker.shared();
    const Job& job = shared.job;
    int position = job.cached, last_row = 0;
    while (position < job.prompt_length) {
      const Rows rows = prompt_rows(shared, position);
      const bool last = position + rows.count == job.prompt_length;
      if (!worker.forward(rows, last ? Wanted::last_row : Wanted::no_row)) return;
      position += rows.count;
      last_row = worker.result_row(rows);
      shared.filled = position;  // all workers of the rank have met since the last layer's KV was stored
      if (worker.decides() && fault_.cancelled) shared.finish = Finish::cancelled;
      if (!worker.settle() || shared.finish != Finish::running) return;
    }
    for (int rows = 1;;) {
      if (!worker.head(last_row, rows, shared.logits.data())) return;
      if (worker.decides()) choose(position);
      if (!worker.settle() || shared.finish != Finish::running) return;
      const Decision decision = shared.decision;
      position += decision.told;
      const Rows next{decision.tokens, decision.rows, position - decision.known};
      const bool forced = decision.known > 1;  // then the last row alone is asked what follows, as in a prompt
      if (!worker.forward(next, forced ? Wanted::last_row : Wanted::every_row)) return;
      last_row = forced ? worker.result_row(next) : 0;
      rows = 1 + decision.rows - decision.known;
    }
  }

  // `position`: of the token that the first row is about.
  void choose(int position) {
    Shared& shared = first();
    const Finish finish = shared.chooser.choose(shared.logits.data(), shared.logits_stride, position, shared.decision,
                                                fault_.cancelled);
    {
      std::lock_guard lock(mutex_);
      published_ = shared.chooser.produced();
      kept_ = shared.chooser.kept();
    }
    news_.notify_all();
    if (finish == Finish::numerical_fault || finish == Finish::mask_fault)
      return raise(finish, position + shared.decision.told);
    shared.finish = finish;
  }

  void raise(Finish fault, int position) {
    fault_.rank = 0, fault_.worker = 0, fault_.stage = static_cast<int>(Stage::head);
    fault_.position = position, fault_.waited_for = fault_.waited_rank = -1;
    first().finish = fault;
    fault_.kind = static_cast<int>(fault);
  }

  // Logits after every token of the prompt: for scoring text and for tests.
  void all_logits(Worker& worker) {
    Shared& shared = worker.shared();
    const Job& job = shared.job;
    const int vocab = collective_ ? collective_->vocab() : shared.model.vocab;
    if (worker.decides() && job.cached == job.prompt_length) shared.finish = Finish::length;
    for (int position = job.cached; position < job.prompt_length;) {
      const Rows rows = prompt_rows(shared, position);
      if (!worker.forward(rows, Wanted::every_row)) return;
      for (int r = 0; r < rows.count; r++) {
        if (!worker.head(r, 1, shared.logits.data())) return;
        float* out = job.logits + static_cast<size_t>(position + r - job.cached) * vocab;
        if (worker.decides()) {
          std::memcpy(out, shared.logits.data(), sizeof(float) * vocab);
          if (position + r + 1 == job.prompt_length) shared.finish = Finish::length;
          else if (fault_.cancelled) shared.finish = Finish::cancelled;
        }
        if (!worker.settle() || shared.finish != Finish::running) return;
      }
      position += rows.count;
    }
  }

  static Rows prompt_rows(const Shared& shared, int position) {
    const Job& job = shared.job;
    return {job.prompt + position, std::min(shared.model.chunk, job.prompt_length - position), position};
  }

  Shared& first() { return *ranks_[0]; }

  static constexpr uint32_t kLateTag = 1u << 31;

  Fault fault_;
  std::unique_ptr<Collective> collective_;  // null where there is one rank
  std::vector<std::unique_ptr<Shared>> ranks_;
  std::vector<Worker> workers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable work_, news_;
  uint64_t jobs_ = 0;
  int busy_ = 0;       // workers that have not finished the job
  int published_ = 0;  // tokens
  int kept_ = 0;       // positions that had their KV when the latest of them were chosen; 0: there are none yet
  int64_t start_ns_ = 0;
  bool closing_ = false;
};

}  // namespace monotape

// The C interface that bridge.py calls.
extern "C" {

using monotape::Engine;

int32_t monotape_size_of(int32_t which) {
  const size_t sizes[] = {sizeof(monotape::Span), sizeof(monotape::Model), sizeof(monotape::Sampling),
                          sizeof(monotape::Job), sizeof(monotape::Status), sizeof(monotape::Step),
                          sizeof(monotape::Group)};
  return static_cast<int32_t>(sizes[which]);
}

// The name of the kernels that `isa` asks for ("": the best ones); null when this machine has none of that name.
const char* monotape_isa(const char* isa) {
  const monotape::Kernels* kernels = monotape::choose_kernels(isa);
  return kernels ? kernels->name : nullptr;
}

// One model a rank; `group` is null for a single one.
Engine* monotape_open(const monotape::Model* models, const monotape::Group* group, const char* isa) {
  const monotape::Kernels* kernels = monotape::choose_kernels(isa);
  try {
    return kernels ? new Engine(models, group, *kernels) : nullptr;
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
void monotape_allow(Engine* engine, const uint32_t* bits) { engine->masks().allow(bits); }
int32_t monotape_force(Engine* engine, const int32_t* ids, int32_t count) { return engine->masks().force(ids, count); }
void monotape_complete(Engine* engine) { engine->masks().complete(); }
// 1: more than `index` tokens have been told; 0: not yet; -1: there will be no more.
int32_t monotape_await(Engine* engine, int32_t index, int32_t timeout_ms) {
  return engine->masks().await(index, timeout_ms);
}
void monotape_mask_deadline(Engine* engine, int64_t deadline_us) { engine->masks().set_deadline_us(deadline_us); }
void monotape_cancel_at(Engine* engine, int64_t look) { engine->cancel_at(look); }
int64_t monotape_looks(Engine* engine) { return engine->looks(); }
void monotape_check_all_drafts(Engine* engine, int32_t all) { engine->check_all_drafts(all); }
void monotape_pass_times(Engine* engine, int64_t* ns) { engine->pass_times(ns); }
void monotape_delay_words(Engine* engine, int64_t longest_ns, uint64_t seed) { engine->delay_words(longest_ns, seed); }
void monotape_stop_rank(Engine* engine, int32_t rank, int32_t after_modules, int64_t deadline_us) {
  engine->stop_rank(rank, after_modules, deadline_us);
}
void monotape_wait(Engine* engine, int32_t seen, int32_t timeout_ms, monotape::Status* status) {
  *status = engine->wait(seen, timeout_ms);
}

}  // extern "C"
