#include "ngram_counts.h"

#include <algorithm>
#include <cmath>

namespace outrider {

namespace {

constexpr double kFirstDoubt = 0.5, kLessBy = 0.65;
constexpr double kShares = 4.0;  // how many shares the assumption weighs as much as
constexpr u32 kRoot = 0;         // the node of the empty context
constexpr int kFirstBits = 10;
constexpr double kLikely = 0.1;  // of a token that came: what one that was likely there weighs in a race of the counts
constexpr double kDoubt = 0.5;  // how often a race of the counts tells nothing of the target's

}  // namespace

Trust::Trust(i64 longest) {
  for (i64 length = 0; length <= longest; ++length) {
    worth_.push_back(1.0 - kFirstDoubt * std::pow(kLessBy, static_cast<double>(std::max<i64>(length - 1, 0))));
    came_.push_back(kShares * worth_.back());
    drafted_.push_back(kShares);
  }
}

void Trust::learn(i64 length, double share, bool came) {
  came_[length] += came;
  drafted_[length] += share;
  worth_[length] = std::min(came_[length] / drafted_[length], 1.0);
}

NgramCounts::NgramCounts(i64 shortest, i64 longest, double least_chance)
    : shortest_(shortest),
      longest_(longest),
      least_chance_(least_chance),
      trust_(longest),
      nodes_(1, Node{}),
      shift_(64 - kFirstBits),
      keys_(std::size_t{1} << kFirstBits),
      children_(std::size_t{1} << kFirstBits, kRoot),
      tails_(1, kRoot) {}

void NgramCounts::extend(u32 token, const u32* likely, i64 likely_count) {
  if (next_guess_ < guesses_.size()) {
    const Guess& guess = guesses_[next_guess_++];
    trust_.learn(guess.length, guess.share, guess.token == token);
    if (guess.token != token) guesses_.clear();
  }
  for (i64 i = 0; i < likely_count; ++i) count_continuation(likely[i], false);
  count_continuation(token, true);
  tails_.swap(longer_tails_);
  if (static_cast<i64>(tails_.size()) > longest_ + 1) tails_.pop_back();  // the last one is no context: it is too long
}

void NgramCounts::go_ahead(u32 token) {
  if (!ahead_) certain_tails_ = tails_;
  ahead_ = true;
  guesses_.clear();  // what is supposed says nothing about them
  longer_tails_.assign(1, kRoot);
  for (const u32 context : tails_) {
    const u32 node = child(context, token);
    if (node == kRoot) break;  // of an n-gram that was never seen, no longer one was
    longer_tails_.push_back(node);
  }
  tails_.swap(longer_tails_);
  if (static_cast<i64>(tails_.size()) > longest_ + 1) tails_.pop_back();
}

void NgramCounts::go_back() {
  if (!ahead_) return;
  ahead_ = false;
  guesses_.clear();
  tails_ = certain_tails_;
}

const std::vector<u32>& NgramCounts::foresee(i64 limit, const Races& races) {
  foreseen_.clear();
  guesses_.clear();
  next_guess_ = 0;
  u32 context = tails_.back();
  i64 length = static_cast<i64>(tails_.size()) - 1;
  double chance = 1.0;
  while (static_cast<i64>(foreseen_.size()) < limit) {
    while (length >= shortest_ && nodes_[context].total == 0) {
      context = nodes_[context].shorter;
      --length;
    }
    if (length < shortest_) break;
    const Choice choice = likeliest(context, races, static_cast<i64>(foreseen_.size()));
    chance *= choice.share * trust_.worth(length);
    if (chance < least_chance_) break;
    foreseen_.push_back(nodes_[choice.node].token);
    guesses_.push_back({nodes_[choice.node].token, length, choice.share});
    // Nothing longer can be known behind one more token. An n-gram too long for a context has no continuations.
    context = choice.node;
    ++length;
  }
  return foreseen_;
}

double NgramCounts::weight(const Node& node) { return node.count + kLikely * node.likely; }

bool NgramCounts::behind(const Node& node, const Node& other) {
  return node.count < other.count || (node.count == other.count && node.likely < other.likely);
}

// The likeliest continuation of a context that has some, `ahead` tokens behind the sequence, and its chance.
NgramCounts::Choice NgramCounts::likeliest(u32 context, const Races& races, i64 ahead) const {
  const Node& of = nodes_[context];
  if (!(races.temperature > 0.0) || nodes_[of.last].before == kRoot)
    return {of.best, static_cast<double>(nodes_[of.best].count) / of.total};
  double most = 0.0;
  for (u32 node = of.last; node != kRoot; node = nodes_[node].before) most = std::max(most, weight(nodes_[node]));
  const RaceKey key = race_key(races.seed, races.stream, races.position + ahead, kForTarget);
  const auto weight_of = [&](u32 node) { return std::pow(weight(nodes_[node]) / most, 1.0 / races.temperature); };
  const auto pace_of = [&](u32 node) {
    const u32 token = nodes_[node].token;
    return weight_of(node) / exponential(race_block(key, token / kRacers).word[token % kRacers]);
  };
  double weights = 0.0, paces = 0.0;
  for (u32 node = of.last; node != kRoot; node = nodes_[node].before) {
    weights += weight_of(node);
    paces += pace_of(node);
  }
  Choice choice = {kRoot, 0.0};
  for (u32 node = of.last; node != kRoot; node = nodes_[node].before) {
    const double share = (1.0 - kDoubt) * pace_of(node) / paces + kDoubt * weight_of(node) / weights;
    if (share > choice.share) choice = {node, share};
  }
  return choice;
}

// Counts `token` behind every tail; the nodes of the n-grams of 0, 1, 2 ... tokens that it ends are the longer tails.
void NgramCounts::count_continuation(u32 token, bool came) {
  longer_tails_.assign(1, kRoot);
  for (const u32 context : tails_) {
    u32& found = child(context, token);
    if (found == kRoot) {
      found = static_cast<u32>(nodes_.size());
      nodes_.push_back({token, 0, 0, longer_tails_.back(), 0, kRoot, kRoot, nodes_[context].last});
      nodes_[context].last = found;
    }
    const u32 node = found;
    ++(came ? nodes_[node].count : nodes_[node].likely);
    nodes_[context].total += came;
    // Not behind: of equally frequent continuations the most recent is the best.
    if (!behind(nodes_[node], nodes_[nodes_[context].best])) nodes_[context].best = node;
    longer_tails_.push_back(node);
  }
}

u32& NgramCounts::child(u32 context, u32 token) {
  if (2 * nodes_.size() >= keys_.size()) grow();
  const u64 key = static_cast<u64>(context) << 32 | token;
  const std::size_t mask = keys_.size() - 1;
  for (std::size_t slot = key * 0x9e3779b97f4a7c15u >> shift_;; slot = (slot + 1) & mask) {
    if (children_[slot] == kRoot) keys_[slot] = key;
    if (keys_[slot] == key) return children_[slot];
  }
}

void NgramCounts::grow() {
  std::vector<u64> keys(2 * keys_.size());
  std::vector<u32> children(2 * keys_.size(), kRoot);
  --shift_;
  keys.swap(keys_);
  children.swap(children_);
  for (std::size_t old = 0; old < keys.size(); ++old)
    if (children[old] != kRoot) child(static_cast<u32>(keys[old] >> 32), static_cast<u32>(keys[old])) = children[old];
}

}  // namespace outrider
