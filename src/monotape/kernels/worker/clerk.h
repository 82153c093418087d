// The clerk: a thread beside the consumers for everything slow. In worker 0 it talks to the host, so that no token waits for
// a bus: it writes tokens and their times to pinned memory, and reads the cancel flag. In every worker it is the watchdog: a
// stage that does not end, or a NaN, ends the request.
#pragma once
#include "worker/consumer.h"
#include "ranks/words.h"
#include "sampling/mask.h"

namespace monotape {

// Called by one consumer thread of worker 0: hands a token to the clerk.
__device__ inline void mail(Shared& shared, int token) {
  const int number = shared.mailed;
  while (number - shared.delivered >= kMailbox)
    if (shared.done) return;
  shared.mail_id[number % kMailbox] = token;
  shared.mail_time[number % kMailbox] = clock_ns();
  fence_block();
  shared.mailed = number + 1;
}

class Clerk {
 public:
  __device__ Clerk(Shared& shared, const Params& params) : shared_(shared), params_(params) {}

  __device__ void work() {
    begin();
    while (!shared_.done) {
      look();
      rest(500);
    }
    end();
  }

  __device__ __forceinline__ void begin() {
    progress_ = shared_.progress;
    since_ = clock_ns();
    if (worker_number() == 0) store_to_host(&params_.status->start_ns, since_);
  }
  __device__ __forceinline__ void look() {
    if (worker_number() == 0) {
      deliver();
      if (!shared_.cancel && load_host_flag(&params_.status->cancel)) shared_.cancel = 1;
    }
    report_nan_place();
    // Before the progress: a wait that has just ended must not be judged by the deadline of the next one.
    const int64_t deadline = deadline_ns();
    if (progress_ != shared_.progress) progress_ = shared_.progress, since_ = clock_ns();
    else if (clock_ns() - since_ > deadline) give_up();
    if (read_flag(&params_.exchange->healthy) == 0) stop_waiting();
  }
  __device__ __forceinline__ void end() {
    fence_block();
    report_nan_place();
    if (worker_number() != 0) return;
    deliver();
    if constexpr (kRows > 1)
      store_to_host(&params_.status->drafted, static_cast<int>(shared_.drafts.drafted)), store_to_host(&params_.status->accepted, static_cast<int>(shared_.drafts.accepted));
    if (shared_.finish != static_cast<int>(Finish::running)) ended(shared_.finish);
  }

 private:
  __device__ void deliver() {
    for (int number = shared_.delivered; number < shared_.mailed; number++) {
      store_to_host(&params_.ids[number], shared_.mail_id[number % kMailbox]);
      if (kRows > 1 && params_.history) params_.history[params_.history_length + number] = shared_.mail_id[number % kMailbox];
      store_to_host(&params_.times_ns[number], shared_.mail_time[number % kMailbox]);
      fence_host();
      store_to_host(&params_.status->tokens, number + 1);
      shared_.delivered = number + 1;
    }
  }

  // Reports to the host how the request ended, unless a worker has already.
  __device__ bool ended(int finish) {
    if (!claim(&params_.exchange->claimed)) return false;
    store_to_host(&params_.status->finish, finish);
    return true;
  }

  // A wait for another rank has the shorter deadline: its worker knows which rank is missing. A wait for the host's mask has a
  // long one.
  __device__ int64_t deadline_ns() const {
    if (asks_host()) return kHostDeadlines * params_.deadline_ns;
    if constexpr (kRanks == 1) return params_.deadline_ns;
    return owed() ? params_.deadline_ns : 2 * params_.deadline_ns;
  }

  __device__ bool asks_host() const {
    return shared_.awaited_progress == shared_.progress && (shared_.awaited_word & kHostWait);
  }
  __device__ bool owed() const { return kRanks > 1 && shared_.owed_progress == shared_.progress; }

  // Past the deadline all workers stop, and each records the word that it waited for. The host blames the one furthest behind.
  __device__ void give_up() {
    ended(static_cast<int>(Finish::deadline_fault));
    mark_unhealthy(&params_.exchange->healthy);
  }
  __device__ void stop_waiting() {
    if (!shared_.failed && owed())
      params_.exchange->waits[worker_number()] =
          make_int4(shared_.position, shared_.owed_layer, shared_.owed_stage, shared_.owed_word);
    else if (!shared_.failed && shared_.awaited_progress == shared_.progress)
      params_.exchange->waits[worker_number()] =
          make_int4(shared_.position, shared_.awaited_layer, shared_.awaited_stage, shared_.awaited_word);
    fence_block();
    shared_.failed = 1;
  }

  __device__ void report_nan_place() {
    const int place = shared_.nan_place;
    if (place < 0 || reported_) return;
    reported_ = true;
    if (ended(static_cast<int>(Finish::numerical_fault)))
      store_to_host(&params_.status->worker, worker_number()), store_to_host(&params_.status->stage, place % kTracedStages),
          store_to_host(&params_.status->layer, place / kTracedStages);
    fence_host();
  }

  Shared& shared_;
  const Params& params_;
  bool reported_ = false;
  int progress_ = 0;
  int64_t since_ = 0;
};

}  // namespace monotape
