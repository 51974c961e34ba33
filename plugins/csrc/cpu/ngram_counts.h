// Counts of the tokens that followed each context of a sequence, and what they foresee.
#pragma once

#include <vector>

#include "../portable.h"
#include "../race.h"

namespace outrider {

// What the share of a continuation is worth, by the length of its context: tokens that came over shares drafted.
//
// Short contexts mislead. Until there is experience, a context of one token is believed by half, and each token more
// takes a third of the doubt: about what held-out code shows.
class Trust {
 public:
  explicit Trust(i64 longest);
  double worth(i64 length) const { return worth_[length]; }
  void learn(i64 length, double share, bool came);

 private:
  std::vector<double> worth_, came_, drafted_;
};

// The races that the target runs behind a sequence; at temperature 0 it takes the likeliest token.
struct Races {
  u64 seed;
  i64 stream;
  i64 position;  // of the next token
  double temperature;
};

// A trie of all n-grams up to longest + 1 tokens. An n-gram's node serves twice: as the count of its last token behind
// the others, and as a context itself. `tails_` are the nodes of the sequence's last 0, 1, 2 ... tokens, so that a new
// token costs one look into a hash table for each length.
class NgramCounts {
 public:
  NgramCounts(i64 shortest, i64 longest, double least_chance);

  // The next token of the sequence, and those that were `likely` in its place.
  void extend(u32 token, const u32* likely, i64 likely_count);

  // A token that the sequence is supposed to go on with: contexts end in it, and nothing is counted. Back to where the
  // sequence was before the first of those; needed before `extend`.
  void go_ahead(u32 token);
  void go_back();

  // The tokens that are foreseen behind the sequence, at most `limit`: the likeliest continuation of the longest context
  // that has one, and so on behind it. That is the most frequent one (of equally frequent ones the most often likely, of
  // those the most recent); where the target runs races, the one that is likeliest to win, by the same score as in TreeExpand. They end where no
  // context is known, or where the chance that all of them come falls below least_chance. What comes is compared with
  // them.
  const std::vector<u32>& foresee(i64 limit, const Races& races);

 private:
  struct Node {
    u32 token;    // the n-gram's last
    u32 count;    // how often that came behind the others
    u32 likely;   // how often it was likely there
    u32 shorter;  // the n-gram without its first token
    u32 total;    // of its continuations' counts
    u32 best;     // of its continuations
    u32 last;     // of its continuations, the one that was seen first the latest
    u32 before;   // of its context's continuations, the one that was seen first before it
  };
  struct Choice {
    u32 node;
    double share;
  };
  struct Guess {
    u32 token;
    i64 length;
    double share;
  };

  static double weight(const Node& node);
  static bool behind(const Node& node, const Node& other);
  void count_continuation(u32 token, bool came);
  Choice likeliest(u32 context, const Races& races, i64 ahead) const;
  u32& child(u32 context, u32 token);
  void grow();

  i64 shortest_, longest_;
  double least_chance_;
  Trust trust_;
  std::vector<Node> nodes_;
  int shift_;                  // leaves the bits of a slot of a product's 64: the best mixed
  std::vector<u64> keys_;      // open addressing: context << 32 | token, where `children_` is not 0
  std::vector<u32> children_;  // the node of the n-gram that is one token longer
  std::vector<u32> tails_, longer_tails_, certain_tails_;
  bool ahead_ = false;
  std::vector<Guess> guesses_;  // behind the sequence as it is
  std::size_t next_guess_ = 0;
  std::vector<u32> foreseen_;
};

}  // namespace outrider
