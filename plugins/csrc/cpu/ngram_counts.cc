#include "ngram_counts.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace outrider {

namespace {

constexpr double kFirstDoubt = 0.5, kLessBy = 0.75, kMostWorth = 0.85;
constexpr double kShares = 8.0;  // how many shares the assumption weighs as much as
constexpr i64 kAlone = 8;        // up to which length contexts learn by themselves
constexpr i64 kGrades[] = {12, 20, 36};  // and longer ones together, up to these lengths
constexpr double kLikely = 0.1;  // weight of a likely token in a race of the counts, relative to one that came
constexpr double kDoubt = 0.5;   // how often a race of the counts is no evidence of the target's
constexpr std::size_t kWidest = 8;  // continuations of one node

}  // namespace

Trust::Trust() {
  for (std::size_t grade = 0; grade <= kAlone + std::size(kGrades) + 1; ++grade) {
    const double doubt = kFirstDoubt * std::pow(kLessBy, std::max(static_cast<double>(grade) - 1.0, 0.0));
    worth_.push_back(std::min(kMostWorth, 1.0 - doubt));
    came_.push_back(kShares * worth_.back());
    drafted_.push_back(kShares);
  }
}

std::size_t Trust::grade(i64 length) {
  if (length <= kAlone) return static_cast<std::size_t>(length);
  const auto found = std::lower_bound(std::begin(kGrades), std::end(kGrades), length);
  return static_cast<std::size_t>(kAlone + 1 + (found - std::begin(kGrades)));
}

void Trust::learn(i64 length, double share, bool came) {
  const std::size_t of = grade(length);
  came_[of] += came;
  drafted_[of] += share;
  worth_[of] = std::min(came_[of] / drafted_[of], 1.0);
}

NgramCounts::NgramCounts(i64 shortest, i64 longest, double least_chance)
    : shortest_(shortest), least_chance_(least_chance), longest_(longest), text_(longest) {}

void NgramCounts::extend(u32 token, const u32* likely, i64 likely_count) {
  if (!judged_) {
    i64 next = -1;
    for (i64 index = at_ + 1; index < static_cast<i64>(nodes_.size()); ++index) {
      const Foreseen& node = nodes_[static_cast<std::size_t>(index)];
      if (node.parent != at_) continue;
      trust_[node.recalled].learn(node.length, node.share, node.token == token);
      if (node.token == token) next = index;
    }
    at_ = next;
    judged_ = next < 0;
  }
  text_.extend(token, likely, likely_count);
  tokens_.push_back(token);
  counted_ = tokens_.size();
  now_.own = text_.tail();
}

void NgramCounts::go_ahead(u32 token) {
  judged_ = true;  // supposed tokens say nothing about them
  tokens_.push_back(token);
  now_.own = text_.step(now_.own, token);
}

void NgramCounts::go_back() {
  if (tokens_.size() == counted_) return;
  tokens_.resize(counted_);
  judged_ = true;
  now_.own = text_.tail();
  if (followed_ > counted_) look_again();
}

void NgramCounts::recall_from(std::shared_ptr<NgramMemory> memory) {
  if (memory == memory_) return;
  memory_ = std::move(memory);
  look_again();
}

// Forgets the matches in the memory.
void NgramCounts::look_again() {
  now_.recalled = {};
  followed_ = 0;
}

const std::vector<Foreseen>& NgramCounts::foresee(i64 limit, const Races& races) {
  std::unique_lock<std::mutex> held;
  if (memory_ != nullptr) {
    held = memory_->hold();
    follow();
  }
  nodes_.clear();
  heap_.clear();
  order_ = 0;
  at_ = -1;
  judged_ = false;
  open(now_, 1.0, -1, 0, races);
  while (!heap_.empty() && static_cast<i64>(nodes_.size()) < limit) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Open best = heap_.back();
    heap_.pop_back();
    nodes_.push_back(best.node);
    open(best.place, best.chance, static_cast<i64>(nodes_.size()) - 1, best.depth, races);
  }
  return nodes_;
}

// Looks up the last tokens in the memory: the new ones, or the longest context where the memory has changed.
void NgramCounts::follow() {
  const std::size_t most = static_cast<std::size_t>(longest_);
  const std::size_t oldest = tokens_.size() > most ? tokens_.size() - most : 0;
  if (followed_ < oldest || version_ != memory_->version()) {
    look_again();
    followed_ = oldest;
    version_ = memory_->version();
  }
  for (; followed_ < tokens_.size(); ++followed_) now_.recalled = step(now_, tokens_[followed_]).recalled;
}

NgramCounts::Place NgramCounts::step(const Place& place, u32 token) const {
  Place next{text_.step(place.own, token), {}};
  for (std::size_t age = 0; memory_ != nullptr && age < next.recalled.size(); ++age) {
    const Suffixes* part = memory_->part(age);
    if (part != nullptr) next.recalled[age] = part->step(place.recalled[age], token);
  }
  return next;
}

// Opens the continuations of a place, `depth` tokens after the sequence.
void NgramCounts::open(const Place& place, double chance, i64 parent, i64 depth, const Races& races) {
  const Suffixes::Match own = text_.continued(place.own, shortest_);
  std::array<Suffixes::Match, 2> recalled{};
  u32 longest = own.length;
  for (std::size_t age = 0; memory_ != nullptr && age < recalled.size(); ++age) {
    const Suffixes* part = memory_->part(age);
    if (part != nullptr) recalled[age] = part->continued(place.recalled[age], shortest_);
    longest = std::max(longest, recalled[age].length);
  }
  if (longest == 0) return;
  const bool from_memory = longest > own.length;
  choices_.clear();
  if (from_memory) {
    gather_recalled(recalled);
  } else {
    gather(own.state, races.temperature > 0.0);
  }
  const double whole = choose(depth, races);
  chance *= trust_[from_memory].worth(longest);
  for (const Choice& choice : choices_) {
    const double share = choice.share / whole;
    if (chance * share < least_chance_) break;
    heap_.push_back({chance * share, order_++, depth + 1, step(place, choice.token),
                     {choice.token, parent, longest, share, from_memory, chance * share}});
    std::push_heap(heap_.begin(), heap_.end());
  }
}

// Fills choices_ with tokens that followed a state of the sequence or, where races are run, were likely to. A token
// goes after those that were likely in its place.
void NgramCounts::gather(u32 state, bool race) {
  for (u32 index = text_.state(state).edges; index != Suffixes::kNone; index = text_.edge(index).next) {
    const Suffixes::Edge& edge = text_.edge(index);
    const u32 count = text_.count(edge);
    const double weight = race ? count + kLikely * edge.likely : count;
    if (!(weight > 0.0)) continue;
    const u64 came = count == 0 ? 0 : 2 * u64{text_.state(edge.to).latest} + 1;
    choices_.push_back({edge.token, edge.likely, std::max(came, 2 * u64{edge.likely_at}), weight});
  }
}

// Fills choices_ with the continuations of the longer match of the memory's two parts, or of both if equally long.
void NgramCounts::gather_recalled(const std::array<Suffixes::Match, 2>& matches) {
  constexpr std::size_t kOlder = NgramMemory::kOlder, kNewer = NgramMemory::kNewer;
  const bool both = matches[kOlder].length == matches[kNewer].length;
  for (const std::size_t age : {kNewer, kOlder}) {
    const Suffixes::Match match = matches[age], other = matches[1 - age];
    if (match.length < other.length) continue;
    const Suffixes& text = *memory_->part(age);
    for (u32 index = text.state(match.state).edges; index != Suffixes::kNone; index = text.edge(index).next) {
      const Suffixes::Edge& edge = text.edge(index);
      const u32 count = text.count(edge);
      const u32 elsewhere = both ? memory_->part(1 - age)->count(other.state, edge.token) : 0;
      if (count == 0 || (age == kOlder && elsewhere > 0)) continue;  // it is there, with the newer one's
      const u64 latest = text.state(edge.to).latest + (age == kNewer ? u64{1} << 32 : 0);
      choices_.push_back({edge.token, 0, latest, static_cast<double>(count) + elsewhere});
    }
  }
}

// Sorts choices_, the best ones first, and returns the total of their shares.
double NgramCounts::choose(i64 depth, const Races& races) {
  double whole = 0.0, most = 0.0;
  for (const Choice& choice : choices_) {
    whole += choice.share;
    most = std::max(most, choice.share);
  }
  if (races.temperature > 0.0 && choices_.size() > 1) {
    const RaceKey key = race_key(races.seed, races.stream, races.position + depth, kForTarget);
    double weights = 0.0, paces = 0.0;
    paces_.clear();
    for (Choice& choice : choices_) {
      choice.share = std::pow(choice.share / most, 1.0 / races.temperature);
      paces_.push_back(choice.share / exponential(race_block(key, choice.token / kRacers).word[choice.token % kRacers]));
      weights += choice.share;
      paces += paces_.back();
    }
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      choices_[i].share = (1.0 - kDoubt) * paces_[i] / paces + kDoubt * choices_[i].share / weights;
    }
    whole = 1.0;
  }
  const auto kept = choices_.begin() + static_cast<std::ptrdiff_t>(std::min(choices_.size(), kWidest));
  std::partial_sort(choices_.begin(), kept, choices_.end(), [](const Choice& one, const Choice& other) {
    if (one.share != other.share) return one.share > other.share;
    return one.likely != other.likely ? one.likely > other.likely : one.latest > other.latest;
  });
  choices_.erase(kept, choices_.end());
  return whole;
}

}  // namespace outrider
