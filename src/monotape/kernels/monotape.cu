// The monokernel: one launch runs a whole request. Every block is a worker; its last warp plays the tape, the others
// take each token through the model. One token's life is `forward` and `choose` below.
#include "attention.h"

namespace monotape {

// The token's embedding becomes this worker's elements of the residual stream. A tied embedding is read off the tape of
// whoever owns its row of the head: eight neighbouring k values of a row are 16 bytes of a block.
__device__ void embed(Consumer& c, int token) {
  const Span& owned = c.span(Stage::output);
  if (c.thread < divide_up(owned.count * 8, 32) * 32) {
    const int tile = c.thread / 8, row = c.thread % 8, k = (owned.first + tile) * 8 + row;
    float value = 0;
    if (tile < owned.count && k < kWidth) {
      const uint16_t* at;
      if (c.params.embedding) {
        at = c.params.embedding + static_cast<int64_t>(token) * kWidth + k;
      } else {
        const int head_tile = token / kTileRows;
        int owner = static_cast<int>(static_cast<int64_t>(head_tile) * kWorkers / divide_up(kVocab, kTileRows));
        const auto head_of = [&](int worker) { return c.params.spans + worker * kMatrixStages + static_cast<int>(Stage::head); };
        while (head_tile < head_of(owner)->first) owner--;
        while (head_tile >= head_of(owner)->first + head_of(owner)->count) owner++;
        const int64_t block = static_cast<int64_t>(head_tile - head_of(owner)->first) * k_blocks(Stage::head) + k / kBlockK;
        const uint8_t* base = c.params.tapes + c.params.tape_start[owner] + head_of(owner)->offset;
        at = reinterpret_cast<const uint16_t*>(base + block * kBlockBytes + (token % kTileRows) * 64) + k % kBlockK;
      }
      value = low_half(*at);
    }
    if (tile < owned.count) c.shared.residual[tile * 8 + row] = value;  // zeros where the last tile is padded
    const uint4 word = gather_word(value);
    if (row == 0 && tile < owned.count) {
      reset(c.params.exchange->residual, c.residual_turn, owned.first + tile);
      publish(c.params.exchange->residual, c.residual_turn, owned.first + tile, word);
    }
  }
}

__device__ bool layer_pass(Consumer& c, int layer, int position, bool wants_head) {
  Exchange& exchange = *c.params.exchange;
  const int turn = c.layer_turn & 1;
  const float* bias = kQkvBias ? c.params.qkv_bias + static_cast<int64_t>(layer) * (kQueryRows + 2 * kKvRows) : nullptr;
  const auto qkv_row = [&](int tile, int row, float y, bool real) {
    const int global = c.span(Stage::qkv).first + tile;
    if (kQkvBias && real) y += bias[global * 8 + row];
    const uint4 word = gather_word(y);
    if (row == 0 && real) publish(exchange.qkv, c.layer_turn, global, word);
  };
  const auto output_row = [&](int tile, int row, float y, bool real) {
    float value = 0;
    if (real) value = c.shared.residual[tile * 8 + row] += y;
    const uint4 word = gather_word(value);
    if (row == 0 && real) publish(exchange.after_attention, c.layer_turn, c.span(Stage::output).first + tile, word);
  };
  const auto gated = [&](int tile, int row, float y, bool real) {  // gate tiles are even, their up tiles follow
    const float up = __shfl_down_sync(~0u, y, 8);
    const float value = y / (1 + __expf(-y)) * up;
    const uint4 word = gather_word(value);
    if (row == 0 && real && tile % 2 == 0)
      publish(exchange.activation, c.layer_turn, (c.span(Stage::gate_up).first + tile) / 2, word);
  };
  const auto first = [&](Stage stage) { return c.span(stage).first; };
  const auto reset_qkv = [&](int tile) { reset(exchange.qkv, c.layer_turn, first(Stage::qkv) + tile); };
  const auto reset_output = [&](int tile) { reset(exchange.after_attention, c.layer_turn, first(Stage::output) + tile); };
  const auto reset_gated = [&](int tile) {
    if (tile % 2 == 0) reset(exchange.activation, c.layer_turn, (first(Stage::gate_up) + tile) / 2);
  };
  const bool last = layer == kLayers - 1;
  const auto reset_down = [&](int tile) {
    const int word = first(Stage::down) + tile;
    if (!last) reset(exchange.residual, c.residual_turn + 1, word);
    else if (wants_head) reset(exchange.final_residual, c.sample_turn, word);
  };
  const auto down_row = [&](int tile, int row, float y, bool real) {
    float value = 0;
    if (real) value = c.shared.residual[tile * 8 + row] += y;
    const uint4 word = gather_word(value);
    if (row != 0 || !real) return;
    if (!last) publish(exchange.residual, c.residual_turn + 1, first(Stage::down) + tile, word);
    else if (wants_head) publish(exchange.final_residual, c.sample_turn, first(Stage::down) + tile, word);
  };
  const int64_t norm = static_cast<int64_t>(layer) * kWidth;
  if (!matrix_stage<Stage::qkv, true>(c, exchange.residual[c.residual_turn & 1], c.params.attention_norm + norm, layer, reset_qkv,
                                       qkv_row)) return false;
  if (!attend(c, layer, position) || !combine(c, layer, position)) return false;
  if (!matrix_stage<Stage::output, false>(c, exchange.attended[turn], nullptr, layer, reset_output,
                                          output_row))
    return false;
  if (!matrix_stage<Stage::gate_up, true>(c, exchange.after_attention[turn], c.params.ffn_norm + norm, layer, reset_gated,
                                           gated))
    return false;
  return matrix_stage<Stage::down, false>(c, exchange.activation[turn], nullptr, layer, reset_down,
                                          down_row);
}

__device__ bool forward(Consumer& c, int token, int position, bool wants_head) {
  embed(c, token);
  for (int layer = 0; layer < kLayers; layer++, c.layer_turn++, c.residual_turn++)
    if (!layer_pass(c, layer, position, wants_head)) return false;
  return true;
}

// The head: logits of this worker's part of the vocabulary, and its best token.
__device__ bool head(Consumer& c, float& best, int& best_id) {
  best = -infinity(), best_id = 0x7fffffff;
  const auto logit = [&](int tile, int row, float y, bool real) {
    const int id = (c.span(Stage::head).first + tile) * 8 + row;
    if (!real || id >= kVocab) return;
    c.params.logits[id] = y;
    if (y > best || (y == best && id < best_id) || y != y) best = y, best_id = id;
  };
  return matrix_stage<Stage::head, true>(c, c.params.exchange->final_residual[c.sample_turn & 1], c.params.final_norm, kLayers,
                                         [](int) {}, logit);
}

__device__ __forceinline__ bool better(float a, int a_id, float b, int b_id) {
  return a != a || (b == b && (a > b || (a == b && a_id < b_id)));  // a NaN beats everything, so that it is noticed
}
__device__ __forceinline__ void best_of_warp(float& value, int& id) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float other = __shfl_xor_sync(~0u, value, o);
    const int other_id = __shfl_xor_sync(~0u, id, o);
    if (better(other, other_id, value, id)) value = other, id = other_id;
  }
}

// Greedy: every worker publishes its best, and every worker finds the best of all.
__device__ bool choose(Consumer& c, float value, int id) {
  c.trace.begin();
  best_of_warp(value, id);
  if (c.lane == 0) c.shared.best_value[c.warp] = value, c.shared.best_id[c.warp] = id;
  if (!c.meet()) return false;
  if (c.warp == 0) {
    value = c.lane < kWarps ? c.shared.best_value[c.lane] : -infinity();
    id = c.lane < kWarps ? c.shared.best_id[c.lane] : 0x7fffffff;
    best_of_warp(value, id);
    // The slot after next was read by all before they published the last turn's word, which this worker has seen.
    uint4(*candidates)[kWorkers] = c.params.exchange->candidates;
    if (c.lane == 0) {
      store_word(&candidates[(c.sample_turn + 1) % 3][blockIdx.x], not_yet());
      fence_device();
      store_word(&candidates[c.sample_turn % 3][blockIdx.x], make_uint4(__float_as_uint(value), id, 0, 0));
    }
    value = -infinity(), id = 0x7fffffff;
    Patience patience(c.params, c.shared, Stage::sample, kLayers);
    for (int w = c.lane; w < kWorkers; w += 32) {
      const uint4 word = wait_word(candidates[c.sample_turn % 3], w, patience);
      if (better(__uint_as_float(word.x), word.y, value, id)) value = __uint_as_float(word.x), id = word.y;
    }
    best_of_warp(value, id);
    if (c.lane == 0) c.shared.next_token = value == value ? id : -1;
  }
  const bool good = c.meet();
  c.sample_turn++;
  c.trace.end(Stage::sample);
  return good;
}

// Worker 0 tells the host; everybody decides alike whether to go on.
__device__ Finish tell(Consumer& c, int token, int produced) {
  const Params& p = c.params;
  Finish finish = Finish::running;
  for (int i = 0; i < p.stop_count; i++)
    if (p.stop_ids[i] == token) finish = Finish::stop;
  if (finish == Finish::running && produced + 1 == p.max_tokens) finish = Finish::length;
  if (token < 0) finish = Finish::numerical_fault;
  if (blockIdx.x == 0 && c.thread == 0) {
    if (token >= 0) {
      store_to_host(&p.ids[produced], token);
      store_to_host(&p.times_ns[produced], clock_ns());
      fence_host();
      store_to_host(&p.status->tokens, produced + 1);
    }
    if (finish != Finish::running) store_to_host(&p.status->finish, static_cast<int>(finish));
  }
  return finish;
}

__device__ void run(Consumer& c) {
  const Params& p = c.params;
  int token = p.prompt[p.cached];
  for (int position = p.cached;; position++) {
    const bool last = position + 1 >= p.prompt_length, wants_head = last || p.logits_out;
    if (!forward(c, token, position, wants_head)) return;
    if (wants_head) {
      float value;
      int id;
      if (!head(c, value, id)) return;
      if (!choose(c, value, id)) return;
    }
    if (p.logits_out && c.span(Stage::head).count) {
      const int first = c.span(Stage::head).first * 8, end = first + c.span(Stage::head).count * 8;
      for (int i = first + c.thread; i < end && i < kVocab; i += kConsumers)
        p.logits_out[static_cast<int64_t>(position - p.cached) * kVocab + i] = p.logits[i];
      if (!c.meet()) return;
    }
    if (!last) {
      token = p.prompt[position + 1];
      continue;
    }
    if (p.logits_out) {
      if (blockIdx.x == 0 && c.thread == 0) store_to_host(&p.status->finish, static_cast<int>(Finish::length));
      return;
    }
    token = c.shared.next_token;
    if (tell(c, token, position + 1 - p.prompt_length) != Finish::running) return;
  }
}

}  // namespace monotape

extern "C" __global__ void __launch_bounds__(monotape::kThreads, 1)
    monotape_request(const __grid_constant__ monotape::Params params) {
  using namespace monotape;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingPages; i++) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    barrier_init_fence();
    shared.waiting = shared.done = shared.failed = 0;
  }
  if (threadIdx.x < kMatrixStages) shared.spans[threadIdx.x] = params.spans[blockIdx.x * kMatrixStages + threadIdx.x];
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Producer(shared, params).play(blockIdx.x);
    return;
  }
  Consumer consumer(params, shared);
  run(consumer);
  if constexpr (kTrace) {
    if (consumer.thread == 0 && params.trace)
      for (int s = 0; s < kTraced; s++) {
        params.trace[(blockIdx.x * kTraced + s) * 2] = consumer.trace.waited[s];
        params.trace[(blockIdx.x * kTraced + s) * 2 + 1] = consumer.trace.total[s];
      }
  }
  if (consumer.thread == 0) shared.done = 1;
}
