// The buffers of a rank and of a worker: all memory that a job needs, made once.
#include <algorithm>

#include "worker.h"

namespace monotape {

// A wait for another rank has the shortest deadline, so that workers of the waiting rank do not blame each other.
Shared::Shared(const Model& m, const Kernels& k, Collective* c, Patience patience, Fault& f)
    : model(m), kernels(k), collective(c), word_spins(patience.spins),
      rendezvous(m.workers, {patience.spins, (c ? 3 : 1) * patience.deadline_us}),
      chooser(k, c ? c->vocab() : m.vocab, m.chunk), fault(f) {
  chooser.masks().set_deadline_us(patience.deadline_us / 4 * 3);  // shorter than that of workers that wait for worker 0
  q_rows = m.heads * m.head_dim;
  kv_rows = m.kv_heads * m.head_dim;
  group = m.heads / m.kv_heads;
  width_stride = round_up(m.width, kTileRows);
  query_stride = round_up(q_rows, kTileRows);
  ffn_stride = round_up(m.ffn, kTileRows);
  const int head_width = c && c->head_input() == HeadInput::concatenate ? m.width * c->ranks() : m.width;
  const int widest = static_cast<int>(round_up(std::max({head_width, q_rows, m.ffn}), kWidestBlock));
  prepared_stride = panel_stride = 0;
  for (const Format format : m.formats) {
    prepared_stride = std::max(prepared_stride, k.prepared_bytes(format, widest));
    panel_stride = std::max(panel_stride, k.panel_bytes(format, widest));
  }
  partial_stride = m.head_dim + kPartialHeader;
  blocks = (m.context + m.kv_block - 1) / m.kv_block;
  residual.resize(m.chunk * width_stride);
  query.resize(m.chunk * query_stride);
  attended.resize(m.chunk * query_stride);
  const size_t passes = std::max(1, m.chosen);  // experts of a row
  activation.resize(m.chunk * passes * ffn_stride);
  choice_stride = round_up(m.experts, kTileRows);
  choice.resize(m.chunk * choice_stride);
  chosen.resize(static_cast<size_t>(m.chunk) * m.chosen);
  expert_weights.resize(chosen.size());
  logits_stride = round_up(c && m.rank == 0 ? c->vocab() : m.vocab, kTileRows) + kTileRows;
  logits.resize(kPassRows * logits_stride);
  partials.resize(kPassRows * m.heads * blocks * partial_stride);
  // Each expert's rows begin a new panel.
  const size_t partly_filled = std::min<size_t>(m.experts, m.chunk * passes);
  panels.resize((whole_panels(static_cast<int>(m.chunk * passes)) / kPanelRows + partly_filled) * panel_stride);
}

Worker::Worker(Shared& shared, int index)
    : shared_(shared), model_(shared.model), kernels_(shared.kernels), index_(index) {
  const Model& m = model_;
  const size_t unit = std::max<size_t>(round_up(m.head_dim, kTileRows), 2 * kTileRows);
  prepared_.resize(std::max(shared.panel_stride, shared.prepared_stride * std::max(1, m.chosen)));
  group_first_.resize(m.experts + 1);
  panel_first_.resize(m.experts + 1);
  entry_row_.resize(shared.chosen.size());
  entry_weight_.resize(shared.chosen.size());
  sums_.resize(m.experts ? static_cast<size_t>(m.chunk) * kTileRows : 0);
  normalised_.resize(std::max({shared.width_stride, shared.ffn_stride, shared.query_stride}));
  product_.resize(whole_panels(m.chunk) * unit);
  scores_.resize(shared.group * round_up(m.kv_block, kTileRows));
  partials_.resize(kRowsAttended * shared.group * shared.blocks * shared.partial_stride);
  wide_keys_.resize(m.kv_block * m.head_dim);
  wide_values_.resize(m.kv_block * m.head_dim);
  if (shared.collective) combined_.resize(static_cast<size_t>(kPassRows) * m.width * shared.collective->ranks());
}

}  // namespace monotape
