// Masks from the host: which tokens may be drawn, worked out there while the layers of the token before stream.
//
// The table (Sampling::masks) is pinned memory of the host, in words of 64 bits. The lower 32 bits of a word are the number
// of the draw that it is about, which is the position of the token to be drawn. The upper 32 bits of word 0 are a Verdict;
// those of word 1 + i are bits of the ids from 32 * i on, and a zero bars an id. There are kMasks such masks, used in turn.
// Every rank reads the same table. Behind the masks is a hint for each: the one token that its mask will allow. Hints come before
// their masks, and are drafts (worker/drafter.h): whether the kernel sees one changes no token.
//
// Memory order. All accesses are relaxed, at system scope.
// 1. The host stores a word at once and it is loaded at once, so a reader that sees the number has the bits.
// 2. The host writes every word of number n, and writes it once. So all workers of all ranks hear the same verdict, and
//    need no exchange to agree on it.
// 3. The host allows tokens in draw n + kMasks - 1 when token n has been mailed: after the words of all workers of all ranks,
//    each of which was published after its worker had met, and so had read its words of number n. An end of the text, number
//    n + kMasks, may follow at any time, over number n.
// 4. Before a launch the numbers of all words are 0, the position of no drawn token.
#pragma once
#include "sampling/settings.h"
#include "sampling/cut.h"

namespace monotape {

enum class Verdict : int { go_on = 0, complete, cancelled };  // backends/cuda/masks.py: Verdict

constexpr int kMaskBits = 32;            // of a word
constexpr int kMasks = kRows > 1 ? 8 : 3;  // several tokens a pass need several masks. backends/cuda/masks.py: masks_for
constexpr int kMaskWords = 1 + (kAllVocab + kMaskBits - 1) / kMaskBits;
constexpr int kTextComplete = -2;        // in the place of a token: nothing may follow
constexpr int kHostWait = 1 << 29;       // flag of a wait for the host; the word is below. backends/cuda/blame.py
constexpr int kHostDeadlines = 30;       // how many deadlines the host has for a mask: a grammar may take its time
constexpr int kHostRestNs = 500;         // between two looks at a word that is late: a load takes the bus a microsecond

__device__ __forceinline__ const uint64_t* hint_word(const Sampling& s, uint32_t number) {
  return s.masks + kMasks * kMaskWords + number % kMasks;
}

// Waits for the mask of draw `number`, and bars tokens in s.adjusted; scratch().verdict says whether to draw at all. False: the
// request has failed. A team for this also has
//   hear(mask, word, number)              the upper half of a word of a mask, when its number has come
//   heard()                               after the waiting: what follows has a deadline of its own
template <class Team>
__device__ __forceinline__ bool obey(Team& t, const Sampling& s, uint32_t number) {
  SelectScratch& scratch = t.scratch();
  const uint64_t* mask = s.masks + number % kMasks * kMaskWords;
  const int first = t.first / kMaskBits, words = t.first < t.end ? (t.end + kMaskBits - 1) / kMaskBits - first : 0;
#pragma unroll 1
  for (int done = 0; done == 0 || done < words; done += kConsumers) {
    if (done + t.thread < words) scratch.allowed[t.thread] = t.hear(mask, 1 + first + done + t.thread, number);
    // Every worker waits for the verdict, one without tokens too: none has to wait for another that waits for the host.
    if (done == 0 && t.thread == kConsumers - 1) scratch.verdict = static_cast<int>(t.hear(mask, 0, number));
    if (!t.meet()) return false;
    t.heard();
    if (scratch.verdict != static_cast<int>(Verdict::go_on)) return true;
    const int here = (first + done) * kMaskBits, next = here + kConsumers * kMaskBits;
#pragma unroll 1
    for (int id = (here > t.first ? here : t.first) + t.thread; id < t.end && id < next; id += kConsumers) {
      if (scratch.allowed[(id - here) / kMaskBits] >> (id - here) % kMaskBits & 1) continue;
      if (s.adjusted[id] == s.adjusted[id]) s.adjusted[id] = -infinity();  // a NaN stays, so that it is noticed
    }
    if (!t.meet()) return false;  // the next words lie over these
  }
  return true;
}

}  // namespace monotape
