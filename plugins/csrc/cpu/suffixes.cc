#include "suffixes.h"

#include <algorithm>

namespace outrider {

namespace {

constexpr int kFirstBits = 10;

// Bits of a table that the edges of `tokens` tokens never fill more than by half.
int bits_for(i64 tokens) {
  int bits = kFirstBits;
  while ((i64{1} << bits) <= 6 * tokens) ++bits;
  return bits;
}

}  // namespace

Suffixes::Suffixes(i64 longest, i64 room)
    : longest_(longest), shift_(64 - bits_for(room)), table_(std::size_t{1} << bits_for(room), 0) {
  states_.reserve(static_cast<std::size_t>(2 * room + 1));
  edges_.reserve(static_cast<std::size_t>(3 * room));
  from_.reserve(static_cast<std::size_t>(3 * room));
  clear();
}

void Suffixes::clear() {
  states_.assign(1, State{0, kNone, 0, 0, kNone});
  edges_.clear();
  from_.clear();
  std::fill(table_.begin(), table_.end(), 0);
  tokens_ = 0;
  begin_text();
}

void Suffixes::begin_text() {
  whole_ = kRoot;
  tail_ = {};
}

void Suffixes::extend(u32 token, const u32* likely, i64 likely_count) {
  for (i64 i = 0; i < likely_count; ++i) {
    for (u32 state = settled(tail_).state; state != kRoot; state = states_[state].link) {
      Edge& edge = connect(state, likely[i]);
      ++edge.likely;
      edge.likely_at = tokens_ + 1;
    }
  }
  append(token);
  for (u32 each = tail_.state; each != kRoot; each = states_[each].link) {
    ++states_[each].count;
    states_[each].latest = tokens_;
  }
}

void Suffixes::lead(u32 token) { append(token); }

void Suffixes::append(u32 token) {
  ++tokens_;
  const Edge* known = find(whole_, token);
  if (known != nullptr && known->to != kNone) {  // in an earlier text
    whole_ = next_of(whole_, token);
  } else {
    const u32 added = static_cast<u32>(states_.size());
    states_.push_back({states_[whole_].length + 1, kRoot, 0, tokens_, kNone});
    u32 state = whole_;
    whole_ = added;
    while (state != kNone) {
      const Edge* edge = find(state, token);
      if (edge != nullptr && edge->to != kNone) break;
      connect(state, token).to = added;
      state = states_[state].link;
    }
    if (state != kNone) {
      const u32 link = next_of(state, token);
      states_[added].link = link;
    }
  }
  tail_ = advanced(tail_, token, longest_ + 1);
}

// The state whose longest string is that of a state and a token after it: parted from longer strings where need be.
u32 Suffixes::next_of(u32 state, u32 token) {
  const u32 next = find(state, token)->to;
  if (states_[next].length == states_[state].length + 1) return next;
  const u32 shorter = split(next, states_[state].length + 1);
  for (Edge* edge; state != kNone && (edge = find(state, token)) != nullptr && edge->to == next;) {
    edge->to = shorter;
    state = states_[state].link;
  }
  return shorter;
}

u32 Suffixes::count(u32 state, u32 token) const {
  const Edge* edge = find(state, token);
  return edge == nullptr ? 0 : count(*edge);
}

Suffixes::Match Suffixes::continued(Match match, i64 shortest) const {
  while (match.length > 0 && match.length >= shortest) {
    for (u32 index = states_[match.state].edges; index != kNone; index = edges_[index].next) {
      if (count(edges_[index]) > 0) return match;
    }
    match.state = states_[match.state].link;
    match.length = states_[match.state].length;
  }
  return {};
}

i64 Suffixes::bytes() const {
  return static_cast<i64>(states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
                          from_.capacity() * sizeof(u32) + table_.capacity() * sizeof(u32));
}

Suffixes::Match Suffixes::step(Match match, u32 token) const { return advanced(match, token, longest_); }

Suffixes::Match Suffixes::within(Match match) const {
  match.length = static_cast<u32>(std::min<i64>(match.length, longest_));
  return settled(match);
}

// The state of a match, which the text's growth may have split.
Suffixes::Match Suffixes::settled(Match match) const {
  while (match.state != kRoot && match.length <= states_[states_[match.state].link].length) {
    match.state = states_[match.state].link;
  }
  return match;
}

Suffixes::Match Suffixes::advanced(Match match, u32 token, i64 longest) const {
  match = settled(match);
  for (;;) {
    const Edge* edge = find(match.state, token);
    if (edge != nullptr && edge->to != kNone) {
      return settled({edge->to, static_cast<u32>(std::min<i64>(match.length + 1, longest))});
    }
    if (match.state == kRoot) return {};
    match.state = states_[match.state].link;
    match.length = states_[match.state].length;
  }
}

// Parts the strings of up to `length` tokens from the others of a state, and returns their own.
u32 Suffixes::split(u32 state, u32 length) {
  const u32 shorter = static_cast<u32>(states_.size());
  State copy = states_[state];
  copy.length = length;
  copy.edges = kNone;
  states_.push_back(copy);
  for (u32 index = states_[state].edges; index != kNone; index = edges_[index].next) {
    const Edge from = edges_[index];
    Edge& edge = connect(shorter, from.token);
    edge.to = from.to;
    edge.likely = from.likely;
    edge.likely_at = from.likely_at;
  }
  states_[state].link = shorter;
  return shorter;
}

Suffixes::Edge* Suffixes::find(u32 state, u32 token) {
  const u32 edge = table_[slot(state, token)];
  return edge == 0 ? nullptr : &edges_[edge - 1];
}

const Suffixes::Edge* Suffixes::find(u32 state, u32 token) const {
  const u32 edge = table_[slot(state, token)];
  return edge == 0 ? nullptr : &edges_[edge - 1];
}

// The edge of a token that leaves a state, which may be new.
Suffixes::Edge& Suffixes::connect(u32 state, u32 token) {
  if (Edge* edge = find(state, token)) return *edge;
  if (2 * (edges_.size() + 1) >= table_.size()) grow();
  edges_.push_back({token, kNone, states_[state].edges, 0, 0});
  from_.push_back(state);
  states_[state].edges = static_cast<u32>(edges_.size() - 1);
  table_[slot(state, token)] = static_cast<u32>(edges_.size());
  return edges_.back();
}

std::size_t Suffixes::slot(u32 state, u32 token) const {
  const u64 key = static_cast<u64>(state) << 32 | token;
  const std::size_t mask = table_.size() - 1;
  for (std::size_t at = key * 0x9e3779b97f4a7c15u >> shift_;; at = (at + 1) & mask) {
    const u32 edge = table_[at];
    if (edge == 0 || (from_[edge - 1] == state && edges_[edge - 1].token == token)) return at;
  }
}

void Suffixes::grow() {
  table_.assign(2 * table_.size(), 0);
  --shift_;
  for (std::size_t edge = 0; edge < edges_.size(); ++edge) {
    table_[slot(from_[edge], edges_[edge].token)] = static_cast<u32>(edge + 1);
  }
}

}  // namespace outrider
