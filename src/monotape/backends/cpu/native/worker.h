// One worker: a thread that plays its own tape through every stage of every layer, for 1 to `chunk` rows at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "chooser.h"
#include "collective.h"
#include "kernels.h"
#include "rendezvous.h"

namespace monotape {

inline size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// State that the workers of a rank share: the exchange buffers of the plan, and the running job.
struct Shared {
  // `collective`: null where there is one rank. All workers share `fault`.
  Shared(const Model& model, const Kernels& kernels, Collective* collective, Patience patience, Fault& fault);

  Model model;
  const Kernels& kernels;
  Collective* collective;
  int word_spins;                              // before a wait for another rank's word yields the core
  Rendezvous rendezvous;
  Chooser chooser;
  Fault& fault;
  Job job{};
  void *keys = nullptr, *values = nullptr;     // this rank's
  std::vector<int> first_words;                // [ranks + 1]: where each rank's share of the vocabulary begins

  int q_rows, kv_rows, group;                  // group: query heads that share a KV head
  size_t width_stride, query_stride, ffn_stride;  // floats a row
  size_t prepared_stride, panel_stride;        // bytes a row, and a panel of rows, of the widest input
  size_t partial_stride, blocks;               // floats a partial result; KV blocks in a whole context
  size_t logits_stride;                        // floats a row
  std::vector<float> residual, query, attended, activation, logits;  // with experts, activation has a row for each
                                               // expert that a row passes
  size_t choice_stride;                        // floats a row
  std::vector<float> choice;                   // logits of the router
  std::vector<int32_t> chosen;                 // [row][chosen]: experts, the lowest first
  std::vector<float> expert_weights;           // [row][chosen]
  std::vector<float> partials;                 // [row][heads][blocks][partial]: decode, where workers share a head's blocks
  std::vector<uint8_t> panels;                 // of a chunk's rows: prefill, where workers share the preparing
  Decision decision;                           // made by worker 0, read by all after they meet
  std::atomic<int32_t> filled{0};              // positions of the prompt whose KV this rank has, all layers of it
  Finish finish = Finish::running;
};

// Rows for which a worker widens the KV of a head once.
constexpr int kRowsAttended = 8;

// The rows of one pass: consecutive tokens of the sequence.
struct Rows {
  const int32_t* tokens;
  int count;
  int position;  // of the first
};

// The rows whose results a pass is for. The last layer is not computed for other rows.
enum class Wanted { every_row, last_row, no_row };

class Worker {
 public:
  Worker(Shared& shared, int index);

  // Before a job: words of it will carry numbers above `tag`.
  void begin_job(uint32_t tag);
  // No word of the last job carries a number above this.
  uint32_t latest_tag() const;
  // Runs the job's tokens through the model. False: a fault ended it.
  bool forward(const Rows& rows, Wanted wanted);
  // Where the last row's result lies after a pass for that row.
  int result_row(const Rows& rows) const { return shared_.collective ? rows.count - 1 : 0; }
  // The head, for `rows` rows of the pass that was computed last, at most kPassRows; their logits land in `out`,
  // logits_stride apart (vocab floats, padded to tiles).
  bool head(int first_row, int rows, float* out);
  bool meet(Stage stage);
  // How often this worker has read the cancel flag in this job.
  int64_t looks() const { return looks_; }
  Shared& shared() { return shared_; }
  // Worker 0 of rank 0 chooses tokens and ends jobs.
  bool decides() const { return index_ == 0 && model_.rank == 0; }
  // After a decision: all workers learn it, those of a rank from its worker 0.
  bool settle() { return (!shared_.collective || agree()) && meet(Stage::head); }

 private:
  struct Input {
    const uint8_t* rows;  // one row alone, or panels
    Format format;        // of the weights that they are prepared for
    int padded_k;
  };

  bool embed(const Rows& rows);
  bool layer(int index, const Rows& rows);
  bool last_layer(const Rows& rows, Wanted wanted);
  // Heads before `first_unit` are left out.
  bool qkv(int layer, const Rows& rows, int first_unit = 0);
  bool attention(int layer, const Rows& rows);
  bool output(int layer, const Rows& rows);
  bool feed_forward(int layer, const Rows& rows);
  bool gate_up(int layer, const Rows& rows);
  bool down(int layer, const Rows& rows);

  // Experts: experts.cpp.
  bool router(int layer, const Rows& rows);
  void choose_experts(int row);
  void group_rows(int rows);
  bool gather(Stage stage, const float* x, size_t stride, const float* gain, int k, Input& input);
  bool expert_gate_up(int layer, const Rows& rows);
  bool expert_down(int layer, const Rows& rows);
  void expert_product(const uint8_t* tiles, int count, const Input& input, int rows, bool panels);
  void gate_tiles(int layer, int expert, int pair, int rows, float* out);
  void finish_tile(Stage stage, int layer, int column, int rows);
  const uint8_t* expert_tiles(Stage stage, int layer, int expert) const;

  // Normalises (gain != null) and prepares the rows of a stage's input. One row, or one panel: every worker does all of it,
  // which is cheaper than a rendezvous. More rows: each worker does some, then all meet.
  bool prepare(Stage stage, const float* x, size_t stride, const float* gain, int k, int rows, Input& input);
  const float* normalised(const float* x, const float* gain, int k);
  // Multiplies `count` tiles with all rows of an input; the results land in product_, `count` tiles a row.
  void product(const uint8_t* tiles, int count, const Input& input, int rows);
  void finish_head(int layer, int unit, const Rows& rows);
  void rotate(float* head, int position) const;
  bool add_to_residual(Stage stage, int layer, const Input& input, int rows);
  bool share_decode_attention(int layer, const Rows& rows);
  float* partials_of(int row, size_t head);  // of the blocks that workers share
  void combine_blocks(int layer, const Rows& rows);
  bool attend_rows(int layer, const Rows& rows, int kv_head, const int* chosen, int count);
  void attend_block(int layer, const Rows& rows, int kv_head, int block);
  // Keys or values of a KV head from `position` on.
  uint8_t* kv_at(void* cache, int layer, int kv_head, int position) const;
  int first_position(int layer, int position) const;
  const float* sink(int layer, int head) const;
  static int module_of(Stage stage, int layer) { return 2 * layer + (stage == Stage::down); }
  bool quits();
  const Span& span(Stage stage) const { return shared_.model.spans[index_ * kStages + static_cast<int>(stage)]; }
  const uint8_t* tiles(Stage stage, int layer) const;

  // Several ranks: ranks.cpp.
  bool take(const Word& word, uint32_t tag, int from, Stage stage, uint32_t& payload, int patience = 1);
  bool take(const Word& word, uint32_t tag, int from, Stage stage, float& value);
  bool stopped();
  void share_tile(int module, int column, int rows);
  bool fold(Stage stage, int module, int rows);
  bool drain(int rows);
  bool combine_lanes(const float* residual, int rows);
  bool gather_logits(float* logits, int rows);
  bool agree();
  bool push_decision();
  bool take_decision();

  Shared& shared_;
  const Model& model_;
  const Kernels& kernels_;
  int index_;
  std::vector<uint8_t> prepared_;              // one row, or one panel
  std::vector<float> normalised_, product_, scores_, combined_;
  std::vector<int> group_first_, panel_first_; // of each expert: its first entry and its first panel; then the ends
  std::vector<int> next_entry_;                // of each expert, while rows are grouped
  std::vector<int> entry_row_;                 // rows by expert: the row of each (row, expert) pair, experts in order
  std::vector<float> entry_weight_;
  std::vector<float> sums_;                    // of the experts of a tile: [row][8]
  std::vector<float> partials_;                // [row][query head of a group][block]: of the rows attended together
  std::vector<float> wide_keys_, wide_values_; // one block of positions in float32
  uint32_t sends_ = 0, heads_ = 0, agreements_ = 0;  // numbers of the last words of each kind
  int modules_ = 0;                            // of this job
  int64_t looks_ = 0;                          // of this job
};

}  // namespace monotape
