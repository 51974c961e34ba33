// The choice of a token by a block of threads, of a row that many blocks have summarised: the rule of ../choice.h.
//
// Weights are integers, so that blocks of any size and number choose as the CPU does. Summaries of shares only exclude
// tokens that cannot be chosen, and never weigh those that can: their least times and masses are bounds, with a margin
// for rounding, and where these leave a choice open, logits are weighed until it is decided.
#pragma once

#include "candidates.h"

namespace outrider {

constexpr i64 kNoFault = 0;
constexpr i64 kNanFault = 1;
constexpr i64 kMaskedFault = 2;
constexpr i64 kIndexFault = 3;

OUTRIDER_DEVICE bool limits(const Sampling& sampling, i64 size) {
  return sampling.top_k >= 1.0 && sampling.top_k < static_cast<double>(size);
}

OUTRIDER_DEVICE bool cuts_at_one(const Sampling& sampling) {
  const bool cuts = sampling.top_p < 1.0 || sampling.min_p > 0.0 || sampling.top_n_sigma > 0.0;
  return cuts && sampling.filter_order == kTemperatureLast;
}

// Every thread calls, and gets it.
OUTRIDER_DEVICE Spread spread_of(const Row& row) {
  Spread own = {0, 0, 0};
  for (i64 i = thread_index(); i < row.size; i += thread_count()) {
    if (order_key(row.logits[i]) != kMinusInfinityKey) add_distance(own, row.logits[i], row.top);
  }
  return {fold(own.count, Sum()), fold(own.sum, Sum()), fold(own.squares, Sum())};
}

// The least weight that min-p and top-n-sigma leave of a row, at the temperature `heat`.
OUTRIDER_DEVICE u64 least_weight(const Row& row, const Sampling& sampling, double heat) {
  const u64 share = least_share(sampling.min_p);
  if (!(sampling.top_n_sigma > 0.0)) return share;
  const u64 cut = sigma_cut(sampling.top_n_sigma, spread_of(row), heat);
  return cut > share ? cut : share;
}

OUTRIDER_DEVICE Wanted wanted_of(const Sampling& sampling, i64 size) {
  const bool drawn = sampling.temperature != 0.0 && !limits(sampling, size);
  const bool nucleus = sampling.top_p < 1.0;
  return {drawn && !nucleus, drawn && nucleus, sampling.temperature, cuts_at_one(sampling) ? 1.0 : sampling.temperature};
}

// The rest of a row after its filters.
struct FilteredRow {
  Row row;
  double heat;         // the temperature at which weights are cut
  double temperature;  // that at which they race
  i32 least_key;       // of a logit that top-k keeps
  u64 cut;             // the least weight that is kept, 1 or more
  Candidates kept;     // a list has final weights, some 0; one token where the row is greedy
  bool everywhere;     // no candidates were listed: any token may be kept
  bool greedy;
  i64 fault;

  // The weight with which a token races.
  OUTRIDER_DEVICE u64 weight_of(float logit) const {
    if (order_key(logit) < least_key) return 0;
    const u64 own = weighed(logit, row.top, heat);
    if (own < cut) return 0;
    return heat == temperature ? own : weighed(logit, row.top, temperature);
  }

  OUTRIDER_DEVICE u64 weight_at(i64 token) const {
    if (greedy) return token == kept.list[0].token ? kept.list[0].weight : 0;
    return weight_of(row.logits[token]);
  }

  // Calls `visit` with every kept token of this thread, and the weight with which it races.
  template <typename Visit>
  OUTRIDER_DEVICE void each(const Visit& visit) const {
    if (!everywhere && kept.listed()) {
      for (i64 i = thread_index(); i < kept.count; i += thread_count()) {
        if (kept.list[i].weight != 0) visit(kept.list[i].token, kept.list[i].weight);
      }
    } else {
      each_in(0, row.groups(), visit);
    }
  }

  // The same of the groups [begin, end), whatever the list holds.
  template <typename Visit>
  OUTRIDER_DEVICE void each_in(i64 begin, i64 end, const Visit& visit) const {
    row.each_token(begin, end, kept.floor, [&](i64 token, float logit) {
      const u64 own = weight_of(logit);
      if (own != 0) visit(token, own);
    });
  }

  // The sum of all weights. Every thread calls, and gets it.
  OUTRIDER_DEVICE u64 total() const {
    u64 own = 0;
    each([&](i64, u64 weight) { own += weight; });
    return fold(own, Sum());
  }
};

// Bounds of the sum of a row's weights: of each share's mass, scaled, and up to a unit for each of its logits.
struct Bounds {
  u64 low;
  u64 high;
};

OUTRIDER_DEVICE Bounds bounds_of_total(const Row& row, double heat) {
  constexpr int kToFraction = 13;  // of units of 2^-40, to units of 2^-53
  constexpr int kMargin = 36;      // far more than the rounding of three exponentials
  u64 own_low = 0;
  u64 own_high = 0;
  for (i64 s = thread_index(); s < shares_of(row.size); s += thread_count()) {
    const u64 scale = weighed(logit_of(row.shares[s].top), row.top, heat);
    if (scale == 0) continue;  // and so is every weight of this share
    const u64 mass = row.shares[s].mass;
    const u64 low = ceil_share(scale << kToFraction, mass);
    own_low += low > kShare + 1 ? low - kShare - 1 : 0;
    own_high += ceil_share((scale + 1) << kToFraction, mass + kShare);
  }
  const u64 low = fold(own_low, Sum());
  const u64 high = fold(own_high, Sum());
  return {low - (low >> kMargin), high + (high >> kMargin) + 1};
}

OUTRIDER_DEVICE u64 need_of(double top_p, u64 total) {
  const u64 need = nucleus_need(top_p, total);
  return need > 0 ? need : 1;
}

// Lists the tokens that top-k and top-p keep, among those that reach the largest logits of the best groups: for top-k
// of as many groups as tokens, for top-p alone of ever more groups, until no other token can be in the nucleus.
// Sets the candidates, the least key and the cut.
OUTRIDER_DEVICE void narrow(FilteredRow& filtered, const Sampling& sampling, Candidate* list) {
  constexpr i64 kFirstGroups = 256;
  constexpr i64 kLastGroups = 2048;  // then all of them
  const Row& row = filtered.row;
  const bool limited = limits(sampling, row.size);
  const bool nucleus = sampling.top_p < 1.0;
  bool complete = limited;  // whether no other token counts
  bool added_up = limited;  // whether the sum of weights is to be known, not its bounds
  Bounds total = nucleus && !limited ? bounds_of_total(row, filtered.heat) : Bounds{0, 0};
  for (i64 groups = limited ? static_cast<i64>(sampling.top_k) : kFirstGroups;; groups *= 2) {
    if (!limited && (groups > kLastGroups || groups > row.groups())) complete = true;
    const i32 floor = complete && !limited ? kLeastFinite : row.floor_of(groups);
    filtered.kept = find_candidates(row, floor, filtered.heat, limited, list);
    if (limited) {
      filtered.least_key = kth_largest_key(
          [&](const auto& visit) {
            each_candidate(row, filtered.kept, filtered.heat, [&](float logit, u64) { visit(order_key(logit)); });
          },
          groups);
    }
    if (!nucleus) return;
    // Weights above it are those of candidates: what lies below the floor weighs less, or one unit more by rounding.
    const u64 reach = weighed(logit_of(floor), row.top, filtered.heat) + 1;
    const auto weights = [&](const Candidates& candidates, const auto& visit) {
      each_candidate(row, candidates, filtered.heat, [&](float logit, u64 weight) {
        if (order_key(logit) >= filtered.least_key) visit(weight);
      });
    };
    for (;;) {
      if (added_up) {
        u64 own = 0;
        weights(complete ? filtered.kept : every_token(list), [&](u64 weight) { own += weight; });
        total.low = total.high = fold(own, Sum());
      }
      const Cut cut = cut_reaching([&](const auto& visit) { weights(filtered.kept, visit); },
                                   need_of(sampling.top_p, total.high));
      if (!complete && cut.weight <= reach) break;
      filtered.cut = cut.weight;
      if (cut.above < need_of(sampling.top_p, total.low)) return;  // the same cut wherever between its bounds the sum is
      added_up = true;
    }
  }
}

// Filters a row; `list` `[kMostCandidates]` is scratch. Every thread calls, and gets the same.
OUTRIDER_OUTLINED FilteredRow filter_row(const float* logits, i64 size, const Share* shares, const Sampling& sampling,
                                       Candidate* list) {
  const volatile Share* told = shares;
  i32 own_top = -kNanKey - 1;
  for (i64 s = thread_index(); s < shares_of(size); s += thread_count()) {
    own_top = told[s].top > own_top ? told[s].top : own_top;
  }
  const i32 top_key = fold(own_top, Largest());
  const double heat = cuts_at_one(sampling) ? 1.0 : sampling.temperature;
  const Row row = {logits, size, told, logit_of(top_key)};
  const bool greedy = sampling.temperature == 0.0;
  FilteredRow filtered = {row, heat, sampling.temperature, kMinusInfinityKey, 1, every_token(list), true,
                          greedy, kNoFault};
  if (top_key > kInfinityKey) filtered.fault = kNanFault;
  if (top_key == kMinusInfinityKey) filtered.fault = kMaskedFault;
  if (filtered.fault != kNoFault) return filtered;
  if (greedy) {
    i64 own_first = size;
    row.each_token(0, row.groups(), top_key,
                   [&](i64 token, float) { own_first = token < own_first ? token : own_first; });
    const i64 first = fold(own_first, Least());
    if (first == size) filtered.fault = kNanFault;  // its summaries are of another row
    if (thread_index() == 0) list[0] = {static_cast<u64>(kWeightOne), static_cast<i32>(first), row.top};
    filtered.kept.count = 1;
    filtered.everywhere = false;
    barrier();
    return filtered;
  }
  const u64 least = least_weight(row, sampling, heat);
  filtered.everywhere = wanted_of(sampling, size).times;
  if (!filtered.everywhere) narrow(filtered, sampling, list);
  filtered.cut = filtered.cut > least ? filtered.cut : least;
  filtered.cut = filtered.cut > 0 ? filtered.cut : 1;
  if (!filtered.everywhere && filtered.kept.listed()) {
    for (i64 i = thread_index(); i < filtered.kept.count; i += thread_count()) {
      list[i].weight = filtered.weight_of(list[i].logit);
    }
    barrier();
  }
  return filtered;
}

// A time and its token: bits of positive floats order as the floats do, and of equal times the lower token wins.
OUTRIDER_OUTLINED u64 finish(RaceKey race, i64 token, u64 weight) {
  const PhiloxBlock block = race_block(race, static_cast<u32>(token / kRacers));
  const u64 time = static_cast<u32>(bits_of(race_time(block.word[token % kRacers], weight)));
  return (time << 32) | static_cast<u64>(token);
}

// The race of a row without candidates: share after share, from the one on that may have the least time, until none can
// have less than the best.
OUTRIDER_DEVICE u64 race_by_shares(const FilteredRow& filtered, const RaceKey& race) {
  constexpr float kMargin = 1.0f - 0x1p-10f;  // far more than the rounding of times and of their scale
  const Row& row = filtered.row;
  u64 best = ~u64{0};
  for (u64 from = 0;;) {
    u64 own = ~u64{0};  // a least time and its share
    for (i64 s = thread_index(); s < shares_of(row.size); s += thread_count()) {
      const float top = logit_of(row.shares[s].top);
      const float x = static_cast<float>(scaled_gap(top, row.top, filtered.temperature));
      const u64 heaviest = weighed(top, row.top, filtered.heat) + 1;  // whatever is rounded
      if (heaviest < filtered.cut || !(x >= kFarthest)) continue;
      const float time = row.shares[s].least_time / shared_exp(x) * (kMargin * 0x1p-40f);
      const u64 entry = (static_cast<u64>(static_cast<u32>(bits_of(time))) << 32) | static_cast<u64>(s);
      if (entry >= from && entry < own) own = entry;
    }
    const u64 next = fold(own, Least());
    if (next == ~u64{0} || (next >> 32) > (best >> 32)) return best;
    const i64 begin = static_cast<i64>(next & 0xffffffffu) * kGroups;
    const i64 end = begin + kGroups < row.groups() ? begin + kGroups : row.groups();
    filtered.each_in(begin, end, [&](i64 token, u64 weight) {
      const u64 entry = finish(race, token, weight);
      best = entry < best ? entry : best;
    });
    best = fold(best, Least());
    from = next + 1;
  }
}

// The token that a race chooses from a row without a fault. Every thread calls, and gets it.
OUTRIDER_OUTLINED i64 draw_token(const FilteredRow& filtered, const RaceKey& race) {
  u64 best = ~u64{0};
  if (filtered.everywhere) {
    best = race_by_shares(filtered, race);
  } else {
    filtered.each([&](i64 token, u64 weight) {
      const u64 entry = finish(race, token, weight);
      best = entry < best ? entry : best;
    });
    best = fold(best, Least());
  }
  return static_cast<i64>(best & 0xffffffffu);
}

}  // namespace outrider
