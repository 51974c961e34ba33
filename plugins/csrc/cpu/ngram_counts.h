// What followed the last tokens of a sequence before, in itself or in a memory, and the tree of tokens that this foresees.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "../portable.h"
#include "../race.h"
#include "ngram_memory.h"
#include "suffixes.h"

namespace outrider {

// What the share of a continuation is worth, by the length of its context: tokens that came over shares drafted.
//
// Short contexts mislead. Until there is experience, a context of one token is believed by half, each token more takes
// a quarter of the doubt, and none is believed by more than 0.85: about what held-out code shows. Long contexts are few:
// those of similar lengths learn together.
class Trust {
 public:
  Trust();
  double worth(i64 length) const { return worth_[grade(length)]; }
  void learn(i64 length, double share, bool came);

 private:
  static std::size_t grade(i64 length);
  std::vector<double> worth_, came_, drafted_;
};

// The races that the target runs after a sequence; at temperature 0 it takes the likeliest token.
struct Races {
  u64 seed;
  i64 stream;
  i64 position;  // of the next token
  double temperature;
};

// A token that is foreseen after another one, `parent`, or after the sequence: -1. Its context is the last `length`
// tokens before it; `share` is its part of what followed that, in the sequence or, `recalled`, in the memory; `chance`
// that the target reaches it, by all shares on its path and what these are worth.
struct Foreseen {
  u32 token;
  i64 parent;
  i64 length;
  double share;
  bool recalled;
  double chance;
};

class NgramCounts {
 public:
  NgramCounts(i64 shortest, i64 longest, double least_chance);

  // The next token of the sequence, and those that were `likely` in its place.
  void extend(u32 token, const u32* likely, i64 likely_count);

  // A token that the sequence is supposed to continue with: contexts end in it, and nothing is counted. Back to where the
  // sequence was before the first of those; needed before `extend`.
  void go_ahead(u32 token);
  void go_back();

  // Foresee by a memory of the same longest context too, or by none: null.
  void recall_from(std::shared_ptr<NgramMemory> memory);

  // The tree of the tokens that are foreseen after the sequence: at most `limit` nodes, the likeliest first, ancestors
  // before descendants. A node's continuations are those of the longest context after it that has some, the sequence's
  // own where the memory knows none of a longer one: each as likely
  // as it is frequent among them (of equally frequent ones the most often likely comes first, of those the most
  // recent); where the target runs races, as it is to win, by the same score as in TreeExpand. A node's chance is the
  // product of the shares on its path, each times what shares after such contexts have been worth, the memory's apart;
  // none falls below least_chance. What comes is compared with them.
  const std::vector<Foreseen>& foresee(i64 limit, const Races& races);

 private:
  // The last tokens before a node, as far as the sequence and both parts of the memory know them.
  struct Place {
    Suffixes::Match own;
    std::array<Suffixes::Match, 2> recalled;
  };
  // A node that may be next; `order` parts equal chances: what was found first comes first.
  struct Open {
    double chance;
    u64 order;
    i64 depth;
    Place place;  // after it
    Foreseen node;
    bool operator<(const Open& other) const {
      return chance < other.chance || (chance == other.chance && order > other.order);
    }
  };
  // A continuation; `latest` orders by when it came last, or was likely. `share` is its count at first.
  struct Choice {
    u32 token;
    u32 likely;
    u64 latest;
    double share;
  };

  void open(const Place& place, double chance, i64 parent, i64 depth, const Races& races);
  Place step(const Place& place, u32 token) const;
  void gather(u32 state, bool race);
  void gather_recalled(const std::array<Suffixes::Match, 2>& matches);
  double choose(i64 depth, const Races& races);
  void look_again();
  void follow();

  i64 shortest_;
  double least_chance_;
  i64 longest_;
  Suffixes text_;
  std::array<Trust, 2> trust_;  // the sequence's, the memory's
  Place now_;
  std::vector<u32> tokens_;    // of the sequence, and those that it is supposed to continue with
  std::size_t counted_ = 0;    // of these, the sequence's
  std::shared_ptr<NgramMemory> memory_;
  std::size_t followed_ = 0;   // tokens that now_.recalled knows of, in this version of the memory
  u64 version_ = 0;
  std::vector<Foreseen> nodes_;
  bool judged_ = true;  // the next tokens say nothing about the nodes
  i64 at_ = -1;         // the node that the sequence has reached; -1: none yet
  std::vector<Open> heap_;
  u64 order_ = 0;
  std::vector<Choice> choices_;
  std::vector<double> paces_;
};

}  // namespace outrider
