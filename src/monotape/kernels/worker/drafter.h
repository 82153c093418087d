// The drafter: in worker 0, the clerk's warp looks for what may follow, while the pass at hand streams. It looks up the last
// tokens in the history, which is a predicted text if the client sent one, the prompt, and the output so far; what followed
// them there is offered as the next drafts. Where a grammar says what must follow, that is offered instead. All other workers
// only follow the offer (sampling/offers.h), so when an offer is made, or whether, changes no token.
#pragma once
#include "worker/clerk.h"

namespace monotape {

constexpr int kNoToken = -2;  // of an offer; -1 would look like a word that has not come

class Drafter {
 public:
  __device__ Drafter(Shared& shared, const Params& params) : shared_(shared), params_(params), draw_(params.prompt_length) {}

  // The whole warp, once the clerk has delivered all tokens before pass `pass`.
  __device__ void look(int pass) {
    if (pass == seen_) {
      if (shared_.drafts.offer_of != pass) offer_hints(pass);  // which may come late
      return;
    }
    seen_ = pass;
    warp_meets();  // lane 0 has written the newest tokens
    // Other warps write these words meanwhile: lane 0 reads for all, who must decide alike, because they shuffle later.
    const int rows = lane_at(shared_.drafts.rows, 0), length = params_.history_length + shared_.delivered;
    time_pass();
    learn(length - known_, length);
    drafted_ = rows - 1;
    draw_ = params_.prompt_length + shared_.delivered + rows - 1;
    if (match_ < 0) find(length);
    if (!offer_hints(pass)) offer(pass, rows, length);
  }

 private:
  static constexpr int kOffered = 4;         // tokens: the one that is expected, and drafts after it
  static constexpr int kLoads = 4;           // in flight in each lane
  static constexpr int kEvidence = 8;        // tokens in a row that need no better match
  static constexpr int kLeastEvidence = 2;
  static constexpr int kFarthest = 1 << 16;  // tokens that are searched
  // The gate, in thousandths of a pass: an accepted draft saves a pass, and a pass with drafts takes longer than one without, by
  // as much as was measured. While drafts have cost more than they saved, only some are offered, to see whether that changes.
  static constexpr int kPass = 1000, kFirstCredit = kPass, kLeastCredit = -2 * kPass, kMostCredit = 4 * kPass, kFirstCost = kPass / 4;
  static constexpr int kProbe = 64, kSureProbe = 8;  // one of so many; of those with all the evidence

  // How long the pass before took.
  __device__ void time_pass() {
    const int64_t now = lane_at(clock_ns(), 0), took = now - began_;  // one lane's, for the same reason
    if (began_ > 0) {
      int64_t& mean = drafted_ > 0 ? ns_with_drafts_ : ns_alone_;
      mean = mean == 0 ? took : mean + (took - mean) / 8;
    }
    began_ = now;
  }
  __device__ int cost() const {
    if (ns_alone_ == 0 || ns_with_drafts_ == 0) return kFirstCost;
    return static_cast<int>((ns_with_drafts_ - ns_alone_) * kPass / ns_alone_);
  }

  // What the tokens since the last look say about the match at hand, and about drafts in general.
  __device__ void learn(int told, int length) {
    if (drafted_ > 0) {
      const int accepted = told - 1 < drafted_ ? told - 1 : drafted_;
      credit_ += kPass * accepted - cost();
      credit_ = smaller(kMostCredit, larger(kLeastCredit, credit_));
      drafted_ = 0;
    }
    for (int i = length - told; i < length && match_ >= 0; i++) {
      const bool same = token_at(i) == token_at(match_);
      match_ = same ? match_ + 1 : -1;
      evidence_ += same;
    }
    known_ = length;
  }

  // The longest place where the last tokens stood before, and of several the newest. `match_` is what followed it.
  __device__ void find(int length) {
    uint32_t best = 0;
    const uint32_t last = token_at(length - 1);
    const int oldest = larger(0, length - kFarthest);
    for (int end = length - 2; end >= oldest && best >> 24 < kEvidence; end -= kLoads * kLanes) {
      uint32_t token[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        const int at = end - i * kLanes - lane_number();
        token[i] = at >= oldest ? token_at(at) : ~last;
      }
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        const int at = end - i * kLanes - lane_number();
        uint32_t key = 0;
        if (token[i] == last) key = static_cast<uint32_t>(run_before(at, length - 1)) << 24 | static_cast<uint32_t>(at - oldest);
        warp_meets();
        key = most_of_lanes(key);
        if (key >> 24 > best >> 24) best = key;
      }
    }
    evidence_ = static_cast<int>(best >> 24);
    match_ = evidence_ >= kLeastEvidence ? static_cast<int>(best & 0xffffff) + oldest + 1 : -1;
  }
  // Equal tokens up to these two places, which have the same.
  __device__ int run_before(int at, int last) const {
    int run = 1;
    while (run < kEvidence && at - run >= 0 && token_at(at - run) == token_at(last - run)) run++;
    return run;
  }

  // If all rows of the pass are accepted and the first of these follows, then the others are the next drafts.
  __device__ void offer(int pass, int rows, int length) {
    if (match_ < 0 || !worth_it()) return;
    publish(pass, static_cast<int>(token_at(continued(match_ + rows - 1 + smaller(lane_number(), kOffered - 1), length))));
  }
  // The same where the host has hints for the choice of the pass's last row and at least the one after it. They are always
  // accepted, so there is no gate.
  __device__ bool offer_hints(int pass) {
    if (!params_.sampling.masks) return false;
    const uint32_t number = static_cast<uint32_t>(draw_ + smaller(lane_number(), kOffered - 1));
    const uint64_t hint = load_from_host(hint_word(params_.sampling, number));
    const int token = static_cast<uint32_t>(hint) == number ? static_cast<int>(hint >> 32) : kNoToken;
    if (lane_at(token, 0) == kNoToken || lane_at(token, 1) == kNoToken) return false;
    publish(pass, token);
    return true;
  }
  // Lane i has token i.
  __device__ void publish(int pass, int token) {
    if (lane_number() < kOffered) shared_.drafts.offer[lane_number()] = token;
    fence_block();
    warp_meets();
    if (lane_number() == 0) shared_.drafts.offer_of = pass;
  }
  // The place of a token that follows the match. Where the match reaches the end of the history, the text has a period: the
  // distance between the two. Tokens past the end are taken one period earlier.
  __device__ int continued(int at, int length) const {
    while (at >= length) at -= length - match_;
    return at;
  }
  __device__ bool worth_it() {
    if (credit_ < 0 && ++held_back_ < (evidence_ >= kEvidence ? kSureProbe : kProbe)) return false;
    held_back_ = 0;
    return true;
  }

  __device__ uint32_t token_at(int at) const { return read_flag(params_.history + at); }

  Shared& shared_;
  const Params& params_;
  int seen_ = 0, known_ = 0, match_ = -1, evidence_ = 0, credit_ = kFirstCredit, held_back_ = 0;
  int drafted_ = 0;  // drafts of the pass at hand
  int draw_;         // the number of its last row's choice
  int64_t began_ = 0, ns_alone_ = 0, ns_with_drafts_ = 0;
};

}  // namespace monotape
