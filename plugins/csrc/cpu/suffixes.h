// A suffix automaton of a text that grows, or of several: where each string occurs, how often, and its continuations.
#pragma once

#include <cstddef>
#include <vector>

#include "../portable.h"

namespace outrider {

// A state stands for all strings that end at the same places of the text; its link is the state of the longest suffix
// of them that ends at more places. Texts of n tokens have at most 2n states and 3n edges, whatever they repeat.
// Source: Blumer et al., 1985, and 1987 for several texts; counts go up along the links as tokens come.
class Suffixes {
 public:
  static constexpr u32 kNone = ~u32{0};
  static constexpr u32 kRoot = 0;  // the state of the empty string

  struct State {
    u32 length;  // of its longest string
    u32 link;
    u32 count;   // how often its strings ended in a token that counts: exact where the shortest has at most `longest` + 1
    u32 latest;  // the number of the token that they ended so with last, from 1 on
    u32 edges;   // the first edge that leaves it; kNone for none
  };
  struct Edge {
    u32 token;
    u32 to;         // kNone: the token never came here, it was likely
    u32 next;       // of the same state
    u32 likely;     // how often it was likely here
    u32 likely_at;  // the number of the token that it was likely in the place of last
  };
  // The last `length` tokens of some text, a string of `state`.
  struct Match {
    u32 state = kRoot;
    u32 length = 0;
  };

  // Strings of up to `longest` tokens are looked for, and of up to one more counted. Memory for `room` tokens is taken
  // at once: none is, until there are more.
  explicit Suffixes(i64 longest, i64 room = 0);

  // The next token of the text, and those that were `likely` in its place.
  void extend(u32 token, const u32* likely, i64 likely_count);

  // A token likewise that does not count as a continuation of the tokens before it.
  void lead(u32 token);

  // The next token begins another text.
  void begin_text();

  // Forgets all texts, and keeps the memory.
  void clear();

  // The longest suffix of the text, and the rest of a match after one more token: of at most `longest` tokens.
  Match tail() const { return within(tail_); }
  Match step(Match match, u32 token) const;

  // How often an edge's token, or any token, has followed the strings of a state.
  u32 count(const Edge& edge) const { return edge.to == kNone ? 0 : states_[edge.to].count; }
  u32 count(u32 state, u32 token) const;
  // The longest suffix of a match that a token has followed; the empty one where that is shorter than `shortest`.
  Match continued(Match match, i64 shortest) const;

  const State& state(u32 index) const { return states_[index]; }
  const Edge& edge(u32 index) const { return edges_[index]; }
  i64 bytes() const;

 private:
  void append(u32 token);
  Match within(Match match) const;
  Match settled(Match match) const;
  Match advanced(Match match, u32 token, i64 longest) const;
  Edge* find(u32 state, u32 token);
  const Edge* find(u32 state, u32 token) const;
  Edge& connect(u32 state, u32 token);
  u32 next_of(u32 state, u32 token);
  u32 split(u32 state, u32 length);
  std::size_t slot(u32 state, u32 token) const;
  void grow();

  i64 longest_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<u32> from_;   // of each edge, the state that it leaves
  int shift_;               // leaves the bits of a slot of a product's 64: the best mixed
  std::vector<u32> table_;  // open addressing by state and token: the number of an edge, from 1 on, or 0
  u32 whole_ = kRoot;       // the state of the whole text, of several the one that grows
  Match tail_;              // of at most `longest` + 1 tokens
  u32 tokens_ = 0;
};

}  // namespace outrider
