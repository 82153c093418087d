// The ring of masks between the host's thread and worker 0. One lock guards all of it: there are two calls a token.
#include "masks.h"

#include <algorithm>
#include <chrono>

#include "rendezvous.h"

namespace monotape {
namespace {

constexpr std::chrono::milliseconds kLook{10};  // between two looks at the cancel flag, which tests set without a wake()

// The only id whose bit is set; -1: there are none or several.
int32_t only_id(const uint32_t* bits, size_t words) {
  int32_t found = -1;
  for (size_t i = 0; i < words; i++) {
    if (!bits[i]) continue;
    if (found >= 0 || bits[i] & (bits[i] - 1)) return -1;
    found = static_cast<int32_t>(i) * kMaskBits + __builtin_ctz(bits[i]);
  }
  return found;
}

}  // namespace

void Masks::begin(bool wanted) {
  std::lock_guard lock(mutex_);
  wanted_ = wanted;
  given_ = taken_ = told_ = 0;
  job_waited_ns_ = 0;
  complete_ = over_ = false;
}

void Masks::end_job() {
  std::lock_guard lock(mutex_);
  over_ = true;
  news_.notify_all();
}

void Masks::allow(const uint32_t* bits) {
  std::lock_guard lock(mutex_);
  Mask& mask = at(given_);
  mask.only = only_id(bits, words_);
  if (mask.only < 0) mask.bits.assign(bits, bits + words_);
  given_++;
  news_.notify_all();
}

int Masks::force(const int32_t* ids, int count) {
  std::lock_guard lock(mutex_);
  const int taken = std::min(count, told_ + kMasksAhead - given_);
  for (int i = 0; i < taken; i++) at(given_++).only = ids[i];
  news_.notify_all();
  return taken;
}

void Masks::complete() {
  std::lock_guard lock(mutex_);
  complete_ = true;
  news_.notify_all();
}

int Masks::await(int index, int timeout_ms) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return told_ > index || over_; });
  return told_ > index ? 1 : over_ ? -1 : 0;
}

void Masks::wake() {
  std::lock_guard lock(mutex_);
  news_.notify_all();
}

Masks::Answer Masks::take(const std::atomic<bool>& cancelled, const Mask*& mask) {
  std::unique_lock lock(mutex_);
  Answer answer = Answer::mask;
  if (given_ == taken_) {
    const int64_t began_ns = now_ns();
    answer = wait(lock, cancelled);
    job_waited_ns_ += now_ns() - began_ns;
  }
  if (answer == Answer::mask) mask = &at(taken_++);
  return answer;
}

Masks::Answer Masks::wait(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& cancelled) {
  while (given_ == taken_ && !complete_) {
    if (cancelled) return Answer::cancelled;
    if (waited_us_ > deadline_us_) return Answer::late;
    if (news_.wait_for(lock, kLook) == std::cv_status::timeout)
      waited_us_ += std::chrono::microseconds(kLook).count();
  }
  return given_ == taken_ ? Answer::complete : Answer::mask;
}

int32_t Masks::take_forced() {
  std::lock_guard lock(mutex_);
  if (given_ == taken_) return -1;
  const int32_t only = at(taken_).only;
  taken_ += only >= 0;
  return only;
}

void Masks::tell() {
  std::lock_guard lock(mutex_);
  told_++;
  news_.notify_all();
}

}  // namespace monotape
