// How the stage table is read: steps of a token, and facts of a stage that is known only when the kernel runs.
#pragma once
#include "machine/machine.h"

namespace monotape {

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int whole_warps(int threads) { return divide_up(threads, kLanes) * kLanes; }

template <bool First, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};
template <bool First, class A, class B>
using Chosen = typename Choose<First, A, B>::Type;

// A step is a matrix that a token passes: those of every layer, then the head.
constexpr int kLayerSteps = kMatrixStages - 1, kTokenSteps = kLayerSteps * kLayers + 1;
constexpr Stage kFirstStage = static_cast<Stage>(0), kLastStage = static_cast<Stage>(kLayerSteps - 1);
constexpr int kTracedStages = static_cast<int>(Stage::rows);  // all but that
__host__ __device__ constexpr int layer_of(int step) { return step / kLayerSteps; }
__host__ __device__ constexpr Stage stage_of(int step) {
  return step == kLayerSteps * kLayers ? Stage::head : static_cast<Stage>(step % kLayerSteps);
}
__host__ __device__ constexpr StageRow row_of(Stage stage) { return stage_row(static_cast<int>(stage)); }

// A fact of a stage's row where the stage is a run-time value: selected among constants, because a table in memory would
// add a load to the path of every token. `Fact` maps a row to a value.
template <class Fact, int I = 0>
__host__ __device__ __forceinline__ constexpr auto of_stage(Stage stage, Fact fact) {
  constexpr StageRow row = stage_row(I);
  if constexpr (I + 1 == kMatrixStages) return fact(row);
  else return static_cast<int>(stage) == I ? fact(row) : of_stage<Fact, I + 1>(stage, fact);
}

__host__ __device__ constexpr Stage first_residual_stage() {
  for (int i = 0;; i++)
    if (stage_row(i).epilogue == Epilogue::residual) return static_cast<Stage>(i);
}
// The stage whose spans own the residual stream; all stages that add to it have the same spans.
constexpr Stage kResidualStage = first_residual_stage();
__device__ __forceinline__ bool adds_to_residual(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.epilogue == Epilogue::residual; });
}
__device__ __forceinline__ bool is_gated(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.epilogue == Epilogue::gated; });
}
// Whether a stage's weights are those of the experts that the router chose; whether their tiles are dealt out one expert's
// after the other's; and whether it is the first of these stages, which waits for the choice.
__device__ __forceinline__ bool is_routed(Stage stage) {
  return kExperts > 0 && of_stage(stage, [](StageRow row) { return row.routed > 0; });
}
__device__ __forceinline__ bool is_dealt(Stage stage) {
  return kExperts > 0 && of_stage(stage, [](StageRow row) { return product(row.product).dealt > 0; });
}
__host__ __device__ constexpr Stage first_routed_stage() {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).routed > 0) return static_cast<Stage>(i);
  return Stage::head;
}
constexpr Stage kFirstRouted = first_routed_stage();
__host__ __device__ constexpr Buffer choice_buffer() {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).epilogue == Epilogue::choice) return stage_row(i).writes;
  return Buffer::residual;
}
constexpr Buffer kChoice = choice_buffer();  // the router's logits
__host__ __device__ constexpr Stage router_stage() {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).epilogue == Epilogue::choice) return static_cast<Stage>(i);
  return Stage::head;
}
constexpr Stage kRouter = router_stage();
// Blocks of one expert in a tile, and of its input.
__host__ __device__ constexpr int expert_blocks(Product p) { return p.blocks / larger(1, p.inputs); }
__host__ __device__ constexpr bool scales_experts() {
  for (int i = 0; i < kMatrixStages; i++)
    if (product(stage_row(i).product).inputs > 0 && stage_row(i).scale != kNoVector) return true;
  return false;
}
// Whether rows of experts that a worker adds up have scales of their own.
constexpr bool kScalesExperts = scales_experts();
__host__ __device__ constexpr Stage stage_after_attention() {
  for (int i = 0;; i++)
    if (stage_row(i).reads == Buffer::attended) return static_cast<Stage>(i);
}
constexpr Stage kAfterAttention = stage_after_attention();
__host__ __device__ constexpr Stage stage_that_attends() {
  for (int i = 0;; i++)
    if (stage_row(i).attends) return static_cast<Stage>(i);
}
constexpr Stage kAttends = stage_that_attends();  // it writes queries, keys and values
__host__ __device__ constexpr Stage reader_of(Buffer buffer) {
  for (int i = 0;; i++)
    if (stage_row(i).reads == buffer) return static_cast<Stage>(i);
}
// The last stage before `stage` that adds to the residual, in this layer or the one before.
template <int I = 0>
__device__ __forceinline__ constexpr Stage residual_before(Stage stage) {
  constexpr Stage kLast = [] {
    Stage last = kLastStage;
    for (int i = 0; i < I; i++)
      if (stage_row(i).epilogue == Epilogue::residual) last = static_cast<Stage>(i);
    return last;
  }();
  if constexpr (I + 1 == kMatrixStages) return kLastStage;
  else return static_cast<int>(stage) == I ? kLast : residual_before<I + 1>(stage);
}

// A module ends with a sum into the residual. Modules are counted through a token.
__host__ __device__ constexpr int count_modules() {
  int count = 0;
  for (int i = 0; i < kLayerSteps; i++) count += stage_row(i).epilogue == Epilogue::residual;
  return count;
}
constexpr int kLayerModules = count_modules(), kModules = kLayerModules * kLayers;
__host__ __device__ constexpr int modules_before(int stage) {
  int count = 0;
  for (int i = 0; i < stage; i++) count += stage_row(i).epilogue == Epilogue::residual;
  return count;
}
template <int I = 0>
__device__ __forceinline__ constexpr int module_in_layer(Stage stage) {
  if constexpr (I + 1 == kLayerSteps) return modules_before(I);
  else return static_cast<int>(stage) == I ? modules_before(I) : module_in_layer<I + 1>(stage);
}
__device__ __forceinline__ int module_of(Stage stage, int layer) { return layer * kLayerModules + module_in_layer(stage); }
// The module before a stage; -1: only the embedding.
__device__ __forceinline__ int module_before(Stage stage, int layer) {
  return stage == Stage::head ? kModules - 1 : module_of(stage, layer) - 1;
}

}  // namespace monotape
