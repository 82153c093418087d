// Offers of drafts: worker 0 says in every pass what it expects to follow, and all workers hear it beside the choice of the
// token. So they agree on the rows of the next pass without another exchange.
//
// Memory order. A pass has one word, three of them are used in turn, and worker 0 resets the word of the pass before when it has
// a word of this pass's choice from every worker (`announce`): each of them has heard the offer of the pass before. The fence
// before the head orders that reset before worker 0's next candidate, so no worker takes an old word two passes later.
#pragma once
#include "worker/drafter.h"

namespace monotape {

__device__ __forceinline__ uint4* offer_word(Exchange& exchange, int pass) {
  return exchange.words + kExchangeWords - 3 + pass % 3;
}

// One thread of each worker; `offered` is read after the barrier that follows the choice.
__device__ __forceinline__ void hear_offer(Consumer& c) {
  if (!c.params.history || c.thread != kLanes) return;
  Drafts& drafts = c.shared.drafts;
  uint4* word = offer_word(*c.params.exchange, drafts.pass);
  if (worker_number() == 0) {
    const bool ready = drafts.offer_of == drafts.pass;
    fence_block();
    const uint32_t none = static_cast<uint32_t>(kNoToken);
    store_word(word, ready ? make_uint4(drafts.offer[0], drafts.offer[1], drafts.offer[2], drafts.offer[3]) : make_uint4(none, none, none, none));
  }
  const int index[1] = {0};
  uint4 heard[1];
  Patience patience(c.shared, c.lost, Stage::sample, kLayers);
  poll(word, index, heard, patience);
  drafts.offered = heard[0];
}

// Rows that a pass from a position on may have, at most `rows`: all in one unit, seeing the same units.
__device__ __forceinline__ int rows_from(int position, int rows) {
  const auto first_unit = [](int at) { return kWidestWindow && at + 1 > kWidestWindow ? (at + 1 - kWidestWindow) / kUnitPositions : 0; };
  while (rows > 1 && ((position + rows - 1) / kUnitPositions != position / kUnitPositions || first_unit(position + rows - 1) != first_unit(position))) rows--;
  return rows;
}

// The rows of the next pass: the token at hand, and drafts where the offer began with it.
__device__ __forceinline__ int plan_rows(Consumer& c, int token, int position, int left, bool all_accepted) {
  const uint4 offered = c.shared.drafts.offered;
  const int draft[3] = {static_cast<int>(offered.y), static_cast<int>(offered.z), static_cast<int>(offered.w)};
  int rows = 1;
  const bool follows = c.params.history && all_accepted && static_cast<int>(offered.x) == token;
#pragma unroll
  for (int row = 1; row < kRows; row++)
    if (follows && rows == row && row < left && draft[row - 1] >= 0) rows++;
  rows = rows_from(position, rows);
  if (!c.meet()) return 0;  // no thread reads the rows before any more
  if (c.thread == 0) {
    Drafts& drafts = c.shared.drafts;
    drafts.token[0] = token;
#pragma unroll
    for (int row = 1; row < kRows; row++) drafts.token[row] = draft[row - 1];
    drafts.rows = rows, drafts.row = 0;
    c.shared.position = position;
    fence_block();
    drafts.pass = drafts.pass + 1;
  }
  return c.meet() ? rows : 0;
}

}  // namespace monotape
