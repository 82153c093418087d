// The structures that cross the boundary between Python and C++. bridge.py declares the same fields in the same order
// and compares the sizes when it loads the library.
#pragma once
#include <cstdint>

namespace monotape {

constexpr int kTileRows = 8;   // plan/types.py: TILE_ROWS
constexpr int kStages = 6;     // qkv, output, router, gate_up, down, head

// How weights lie on a tape: formats.h. bridge.py: FORMAT_CODES.
enum class Format : int32_t {
  f32 = 0, f16 = 1, bf16 = 2, q8 = 3,
  int4_g32 = 4, int4_g64 = 5, int4_g128 = 6, int4_g32z = 7, int4_g64z = 8, int4_g128z = 9,
  q4_1 = 10, q5_0 = 11, q4_k = 12, q5_k = 13, q6_k = 14, k_mixed = 15, wide = 16,
  mxfp4 = 17,
};
enum class Stage : int32_t { qkv = 0, output = 1, router = 2, gate_up = 3, down = 4, head = 5 };
enum class JobKind : int32_t { generate = 0, logits = 1 };
enum class HeadInput : int32_t { own = 0, mean = 1, sum = 2, concatenate = 3 };  // plan/types.py: Plan.head_input
enum class Finish : int32_t { running = 0, stop = 1, length = 2, cancelled = 3, numerical_fault = 4, deadline_fault = 5, mask_fault = 6 };

// One worker's share of one stage: its tiles, and where they lie on its tape, or in each expert of the library.
struct Span {
  int32_t first;
  int32_t count;
  int64_t offset;
};

// What a rank does with its partial output of a module: plan/types.py, Step. folds -1: nothing.
struct Step {
  float own;
  int32_t sends, folds, whole;
};

// Fields that all ranks share. All others belong to one rank.
struct Group {
  int32_t ranks, steps, slots, vocab;
  HeadInput head_input;
  const Step* schedule;            // [steps]
};

struct Model {
  int32_t layers, width, heads, kv_heads, head_dim, ffn, vocab;  // as this rank has them
  int32_t rope_dims, context, chunk, kv_block, workers;
  int32_t experts, chosen, softmax_over_all;  // experts 0: a dense model, without a router; models/experts.py
  Format formats[kStages];         // of each stage's weights
  Format embedding_format, kv_format;
  float norm_eps, attention_scale;
  float gate_alpha, gate_limit, gate_shift;  // models/experts.py: Gating; gate_limit 0: none, and silu(gate) * up
  int32_t rank, first_word;        // first_word: of the vocabulary, where this rank's share begins
  int64_t deadline_us;             // how long a worker may wait for another
  const int32_t* windows;          // [layers]; 0: the layer sees every position
  const float* cosines;            // [context][rope_dims / 2]
  const float* sines;
  const float* attention_norm;     // [layers][width]
  const float* ffn_norm;           // [layers][width]
  const float* final_norm;         // [width]
  const float* qkv_bias;           // [layers][q rows + 2 kv rows], or null
  const float* q_norm;             // [layers][head_dim], or null
  const float* k_norm;             // [layers][head_dim], or null
  const uint8_t* embedding;        // tiles of the vocabulary, or null: a single rank reads it off the head's tiles
  const uint8_t* const* tapes;     // [workers]
  const int64_t* layer_bytes;      // [workers]
  const Span* spans;               // [workers][kStages]
  const float* sinks;              // [layers][heads], or null; so are the biases
  const float* output_bias;        // [layers][width]; of several ranks the first has it
  const float* router_bias;        // [layers][experts]
  const float* gate_bias;          // [layers][experts][ffn]
  const float* up_bias;            // [layers][experts][ffn]
  const float* down_bias;          // [layers][experts][width]; of several ranks the first has it
  const uint8_t* library;          // [layers][experts][expert_bytes], or null
  int64_t expert_bytes;
};

struct Sampling {
  float temperature, top_p, min_p;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k, bias_count;
  const int32_t* bias_ids;
  const float* bias_values;
  uint64_t seed;
};

struct Job {
  JobKind kind;
  int32_t prompt_length, cached, max_tokens, min_tokens, stop_count, top_logprobs;  // top_logprobs -1: none at all
  int32_t history_length;          // of the prediction and the prompt
  int32_t masked;                  // every choice waits for a mask: masks.h
  const int32_t* prompt;
  const int32_t* stop_ids;
  int32_t* history;                // prediction, prompt, room for max_tokens: drafts are looked up in it; null: no drafts
  void* const* keys;               // of each rank: [layers][kv_heads][kv_capacity][head_dim]
  void* const* values;
  int64_t kv_capacity;             // positions
  Sampling sampling;
  float* logits;                   // kind logits: [prompt_length - cached][vocab]
  int32_t* ids;                    // [max_tokens]
  int64_t* times_ns;               // [max_tokens]
  float* logprobs;                 // [max_tokens]
  int32_t* top_ids;                // [max_tokens][top_logprobs]
  float* top_values;
};

struct Status {
  Finish finish;
  int32_t tokens;                  // published so far
  int32_t filled;                  // leading positions whose KV every rank has, the cached ones included
  int32_t fault_worker, fault_stage, fault_position, fault_waited_for;
  int32_t fault_rank, fault_waited_rank;  // waited_rank -1: a worker of the same rank
  int32_t drafted, accepted;       // drafts that passes checked, and passes that they saved; known at the end
  int64_t start_ns;
};

static_assert(sizeof(Span) == 16 && sizeof(Step) == 16 && sizeof(Group) == 32 && sizeof(Model) == 296 && sizeof(Sampling) == 56 && sizeof(Job) == 192 &&
              sizeof(Status) == 56);

}  // namespace monotape
