// The work of a worker with several ranks: partial sums, lanes that are combined for the head, logits and choices.
#include <algorithm>
#include <cstring>
#include <thread>

#include "worker.h"

namespace monotape {

void Worker::begin_job(uint32_t tag) {
  sends_ = heads_ = agreements_ = tag;
  modules_ = 0;
  looks_ = 0;
}

uint32_t Worker::latest_tag() const {
  return std::max({sends_ + (shared_.collective ? shared_.collective->sends() : 0), heads_, agreements_});
}

// Polls a word until it carries `tag`.
bool Worker::take(const Word& word, uint32_t tag, int from, Stage stage, uint32_t& payload, int patience) {
  shared_.collective->link_delay.pass(model_.rank);
  uint64_t found = 0;
  const auto ready = [&] {
    found = word.load(std::memory_order_acquire);
    return static_cast<uint32_t>(found >> 32) == tag;
  };
  const Waiter waiter{model_.rank, index_, static_cast<int>(stage)};
  const Patience wait{shared_.word_spins, shared_.collective->deadlines_us[from] * patience};
  if (!wait_until(ready, wait, waiter, -1, from, shared_.fault, static_cast<int>(Finish::deadline_fault))) return false;
  payload = static_cast<uint32_t>(found);
  return true;
}

bool Worker::take(const Word& word, uint32_t tag, int from, Stage stage, float& value) {
  uint32_t payload;
  if (!take(word, tag, from, stage, payload)) return false;
  std::memcpy(&value, &payload, 4);
  return true;
}

// For tests of the deadline: a rank that stops stays where it is until a fault is raised.
bool Worker::stopped() {
  const Collective& collective = *shared_.collective;
  if (collective.stopped_rank.load() != model_.rank || modules_++ < collective.stopped_after.load()) return false;
  while (!shared_.fault.kind.load()) std::this_thread::yield();
  return true;
}

// The owner of a tile of the residual has its partial product in product_: adds its own share and sends it.
void Worker::share_tile(int module, int column, int rows) {
  Collective& collective = *shared_.collective;
  const Step& step = collective.step(module);
  const uint32_t tag = sends_ + collective.send_index(module) + 1;
  for (int r = 0; r < rows; r++) {
    const float* partial = product_.data() + r * kTileRows;
    float* residual = shared_.residual.data() + r * shared_.width_stride + column;
    for (int i = 0; step.own != 0 && i < kTileRows; i++) residual[i] += step.own * partial[i];
    for (int peer = 0; step.sends && peer < collective.ranks(); peer++) {
      Word* words = collective.partial(peer, tag, model_.rank, r) + column;
      for (int i = 0; i < kTileRows; i++) collective.push(words[i], partial[i], tag, model_.rank);
    }
  }
}

// Adds the sum that a step folds to the elements of the residual that this worker owns.
bool Worker::fold(Stage stage, int module, int rows) {
  Collective& collective = *shared_.collective;
  const Step& step = collective.step(module);
  if (step.folds < 0) return true;
  const uint32_t tag = sends_ + collective.send_index(step.folds) + 1;
  const Span& owned = span(Stage::down);
  for (int r = 0; r < rows; r++) {
    float* residual = shared_.residual.data() + r * shared_.width_stride;
    for (int column = owned.first * kTileRows; column < (owned.first + owned.count) * kTileRows; column++) {
      float sum = 0, value;
      bool first = true;
      for (int from = 0; from < collective.ranks(); from++) {
        if (!step.whole && from == model_.rank) continue;
        if (!take(collective.partial(model_.rank, tag, from, r)[column], tag, from, stage, value)) return false;
        sum = first ? value : sum + value;
        first = false;
      }
      residual[column] += sum;
    }
  }
  return true;
}

// Sums that are still in flight after the last module.
bool Worker::drain(int rows) {
  for (int module = 2 * model_.layers; module < shared_.collective->steps(); module++)
    if (!fold(Stage::head, module, rows)) return false;
  return meet(Stage::head);
}

// Combines the lanes for the head, where it reads more than this rank's residual; the results are in combined_.
bool Worker::combine_lanes(const float* residual, int rows) {
  Collective& collective = *shared_.collective;
  const HeadInput kind = collective.head_input();
  const int width = model_.width, ranks = collective.ranks();
  const size_t stride = static_cast<size_t>(width) * (kind == HeadInput::concatenate ? ranks : 1);
  const uint32_t tag = heads_ + 1;
  const Span& owned = span(Stage::down);
  const int end = std::min(width, (owned.first + owned.count) * kTileRows);
  for (int r = 0; r < rows; r++, residual += shared_.width_stride) {
    const float* own = kind == HeadInput::sum ? residual : normalised(residual, model_.final_norm, width);
    for (int peer = 0; peer < ranks; peer++) {
      Word* words = collective.lane(peer, model_.rank, r);
      for (int i = owned.first * kTileRows; i < end; i++) collective.push(words[i], own[i], tag, model_.rank);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int from = 0; from < ranks; from++) {
      const Word* words = collective.lane(model_.rank, from, r);
      float* out = combined_.data() + r * stride + (kind == HeadInput::concatenate ? static_cast<size_t>(from) * width : 0);
      for (int i = 0; i < width; i++) {
        float value;
        if (!take(words[i], tag, from, Stage::head, value)) return false;
        out[i] = from && kind != HeadInput::concatenate ? out[i] + value : value;
      }
    }
  for (int i = 0; kind == HeadInput::mean && i < rows * width; i++) combined_[i] /= static_cast<float>(ranks);
  return meet(Stage::head);  // no worker overwrites a lane that another worker of this rank still reads
}

// Pushes the logits of this rank's part of the vocabulary to rank 0, which chooses.
bool Worker::gather_logits(float* logits, int rows) {
  Collective& collective = *shared_.collective;
  const uint32_t tag = ++heads_;
  const size_t stride = shared_.logits_stride;
  if (model_.rank) {
    const Span& owned = span(Stage::head);
    const int end = std::min(model_.vocab, (owned.first + owned.count) * kTileRows);
    for (int r = 0; r < rows; r++) {
      Word* words = collective.logits(0, r) + model_.first_word;
      for (int i = owned.first * kTileRows; i < end; i++)
        collective.push(words[i], logits[r * stride + i], tag, model_.rank);
    }
    return true;
  }
  if (!meet(Stage::head)) return false;  // the last tile of rank 0 may reach past its part of the vocabulary
  if (index_) return true;
  for (int r = 0; r < rows; r++)
    for (int rank = 1; rank < collective.ranks(); rank++)
      for (int i = shared_.first_words[rank]; i < shared_.first_words[rank + 1]; i++)
        if (!take(collective.logits(0, r)[i], tag, rank, Stage::head, logits[r * stride + i])) return false;
  return true;
}

// Worker 0 of rank 0 pushes its decision, a word for the counts and one for each token; worker 0 of every other rank polls
// them. Only these workers count the words.
bool Worker::agree() {
  if (index_) return true;
  return model_.rank ? take_decision() : push_decision();
}

bool Worker::push_decision() {
  Collective& collective = *shared_.collective;
  const Decision& decision = shared_.decision;
  const auto push = [&](uint32_t payload) {
    const uint32_t tag = ++agreements_;
    for (int peer = 1; peer < collective.ranks(); peer++)
      collective.push(*collective.control(peer, tag), payload, tag, model_.rank);
  };
  push(static_cast<uint32_t>(shared_.finish) | static_cast<uint32_t>(decision.told) << 8 |
       static_cast<uint32_t>(decision.rows) << 16 | static_cast<uint32_t>(decision.known) << 24);
  for (int r = 0; r < decision.rows; r++) push(static_cast<uint32_t>(decision.tokens[r]));
  return true;
}

bool Worker::take_decision() {
  Collective& collective = *shared_.collective;
  Decision& decision = shared_.decision;
  uint32_t payload;
  // Twice the deadline: rank 0 may itself wait for the rank that stopped, and shall report it first.
  const auto take_next = [&] {
    const uint32_t tag = ++agreements_;
    return take(*collective.control(model_.rank, tag), tag, 0, Stage::head, payload, 2);
  };
  if (!take_next()) return false;
  shared_.finish = static_cast<Finish>(payload & 255);
  decision.told = static_cast<int32_t>(payload >> 8 & 255);
  decision.rows = static_cast<int32_t>(payload >> 16 & 255);
  decision.known = static_cast<int32_t>(payload >> 24);
  for (int r = 0; r < decision.rows; r++) {
    if (!take_next()) return false;
    decision.tokens[r] = static_cast<int32_t>(payload);
  }
  return true;
}

}  // namespace monotape
