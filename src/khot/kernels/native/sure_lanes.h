// The sure way of sure.h for short rows of σ_k side by side. No step depends on the other rows, so neither does a
// result.
#pragma once

#include "quick_lanes.h"
#include "sure.h"

namespace {

constexpr int kMostSteps = 40;
constexpr int kLoose = 3;  // so many passes of a selection are over all columns

// Numbers whose order as signed integers is that of the scores, and back. No NaN.
inline FloatMask column_key(Floats x) {
  const FloatMask bits = (FloatMask)x;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline Floats column_of(FloatMask key) { return (Floats)(key ^ ((key >> 31) & 0x7fffffff)); }

// Copies of the scores of each row whose keys lie in [low, high], as columns, behind which a row has −inf; returns how many
// columns. Rows that are not `wanted` have none. `skipped`: how many of a row are above.
inline int64_t pack_columns(const Row<float>* rows, unsigned wanted, FloatMask low, FloatMask high, Floats* x,
                            double* skipped) {
  using V = Vec<float>;
  float room[kRows][khot::kShort];
  int64_t counts[kRows] = {}, most = 0;
  for (; wanted; wanted &= wanted - 1) {
    const int r = __builtin_ctz(wanted);
    const FloatMask least = FloatMask{} + low[r], largest = FloatMask{} + high[r];
    int above = 0;
    counts[r] = pack_scores<V>(rows[r], room[r], [=, &above](auto at, auto* score) {
      *score = at.scores(rows[r]);
      const FloatMask key = column_key(*score);
      above += __builtin_popcount(V::lanes(at.only(key > largest)));
      return (key >= least) & (key <= largest);
    });
    skipped[r] = above;
    most = counts[r] > most ? counts[r] : most;
  }
  for (int64_t j = 0; j < most; j += kRows) {
    for (int r = 0; r < kRows; ++r) {
      const auto rest = FloatMask{} + (int32_t)(counts[r] - j);
      x[j + r] = V::blend(V::iota() < rest, V::load(room[r] + j), V::set(-std::numeric_limits<float>::infinity()));
    }
    transpose(x + j);
  }
  return most;
}

// The scores of rank r = ⌈k⌉ and ⌊k⌋ + 1 (1 = largest) of each row, between two that occur: two times where the rank lies
// if the scores between are spread evenly, and then half way between their keys. After a few passes the scores that are
// left are packed. `share`: what is left of k for each of the scores that are equal to that of rank r, ½ if it is alone.
// Rows that are not `wanted` may get any number.
inline void select_columns(const Row<float>* given, const Columns& rows, unsigned wanted, Floats* upper, Floats* lower,
                           Floats* share) {
  using V = Vec<float>;
  using Distance = FloatBits;
  FloatMask rank{}, is_integer{};
  for (int r = 0; r < kRows; ++r) {
    const double up = wanted >> r & 1 ? std::ceil(rows.k64[r]) : 0;
    rank[r] = (int32_t)up;
    is_integer[r] = up == rows.k64[r] ? -1 : 0;
  }
  int64_t n = rows.n;
  FloatMask keys[khot::kShort], low, high;  // the key of rank r is one of [low, high]
  low = high = column_key(rows.x[0]);
  for (int64_t j = 0; j < n; ++j) {
    const FloatMask key = keys[j] = column_key(rows.x[j]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  FloatMask reached = FloatMask{} + (int32_t)n, before = low;  // how many reach `low`, and the next smaller key
  FloatMask above{}, packed_away{};  // how many are larger than `high`, and than what is packed
  for (int i = 0;; ++i) {
    const FloatMask is_done = (low == high) | (reached == rank);
    const unsigned left = wanted & ~V::lanes(is_done);
    if (!left) break;
    if (i == kLoose && n > kNarrow) {
      Floats some[khot::kShort];
      double none[kRows];
      n = pack_columns(given, left, low, high, some, none);
      for (int64_t j = 0; j < n; ++j) keys[j] = column_key(some[j]);
      packed_away = above;
    }
    // A pivot in (low, high]; differences are unsigned, and those on the wrong side are the largest.
    FloatMask beneath = (FloatMask)((Distance)low + (((Distance)high - (Distance)low) >> 1));
    if (i % 3 != 2) {
      const auto most = column_of(high), all = V::sub(column_of(low), most);
      const auto way = (__builtin_convertvector(rank - above, Floats) - 0.5f) /
                       __builtin_convertvector(reached - above, Floats);
      const FloatMask key = column_key(V::fma(way, all, most)), last = high - 1;
      beneath = key > low ? key : low;
      beneath = beneath < last ? beneath : last;
    }
    const FloatMask pivot = beneath + 1;
    FloatMask count = packed_away;
    Distance up = ~Distance{}, down = ~Distance{};
    for (int64_t j = 0; j < n; ++j) {
      count -= keys[j] > beneath;
      const Distance over = (Distance)keys[j] - (Distance)pivot, under = (Distance)beneath - (Distance)keys[j];
      up = over < up ? over : up;
      down = under < down ? under : down;
    }
    const FloatMask is_high = rank > count;  // too few reach the pivot
    const FloatMask falls = is_high & ~is_done, rises = ~(is_done | is_high);
    const auto smaller_key = (FloatMask)((Distance)beneath - down), larger_key = (FloatMask)((Distance)pivot + up);
    high = falls ? smaller_key : high;
    above = falls ? count : above;
    before = rises ? smaller_key : before;
    low = rises ? larger_key : low;
    reached = rises ? count : reached;
  }
  *upper = column_of(low);
  *lower = V::blend(is_integer & (reached == rank), column_of(before), *upper);
  const auto part = (rows.k - __builtin_convertvector(above, Floats)) / __builtin_convertvector(reached - above, Floats);
  *share = V::blend((low == high) & (reached - above > 1), part, V::set(0.5f));
}

struct ColumnTails {
  Floats lower, upper, lower_v, upper_v;  // as in Tails
  Floats excess, difference;              // N − k, and left − right, rounded once
};

// −z·log₂e, for −z = (anchor − x)·scale + shift.
struct ColumnMargin {
  Floats anchor, scale, shift;
  Floats of(Floats x) const { return Vec<float>::fma(anchor - x, scale * (float)(1 / kLn2), shift * (float)(1 / kLn2)); }
};

// Of n columns.
inline ColumnTails tails(const Floats* x, int64_t n, const double* k, const ColumnMargin& margin) {
  using V = Vec<float>;
  Total lower, upper, above;
  Floats lower_v = V::set(0), upper_v = V::set(0);
  for (int64_t j = 0; j < n; j += 8) {
    Floats all = V::set(0), high = V::set(0), number = V::set(0);
    for (int64_t i = j; i < j + 8 && i < n; ++i) {
      const auto t = margin.of(x[i]), either = sigma_of<V>(V::abs(t));
      const auto is_above = V::gt(V::set(0), t);
      const auto tail = V::keep(is_above, either), v = spread(either), density = V::keep(is_above, v);
      high = V::add(high, tail);
      all = V::add(all, V::sub(either, tail));
      upper_v = V::add(upper_v, density);
      lower_v = V::add(lower_v, V::sub(v, density));
      number = V::add(number, V::keep(is_above, V::set(1)));
    }
    lower.add(all);
    upper.add(high);
    above.add(number);
  }
  const Total difference = lower.minus(upper).plus(above);
  return {lower.rounded(), upper.rounded(), lower_v, upper_v, above.less(k), difference.less(k)};
}


// Solves kRows rows; p is written for those whose bit is NOT set in the result.
inline unsigned sure_group(const Row<float>* given, int count, float* const* out) {
  using V = Vec<float>;
  const auto largest = V::set(Limits<float>::largest), zero = V::set(0), one = V::set(1), half = V::set(0.5f);
  Floats finite = zero, infinite = zero, nans = zero;
  const Columns rows(given, [&](const Floats* block, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      finite = V::add(finite, V::keep(V::ge(largest, V::abs(block[i])), one));
      infinite = V::add(infinite, V::keep(V::gt(block[i], largest), one));
      nans = V::add(nans, V::blend(V::ge(block[i], block[i]), zero, one));
    }
  });
  // A finite threshold, no NaN, and a temperature whose inverse is a number.
  const auto rest = V::sub(rows.k, infinite), temperature = rows.temperature, scale = V::div(one, temperature);
  const auto has_root = V::both(V::gt(rest, zero), V::gt(finite, rest));
  const auto is_usual = V::both(V::gt(temperature, V::set(1e-30f)), V::gt(V::set(1e30f), temperature));
  const auto usable = V::both(V::both(has_root, is_usual), V::ge(zero, nans));
  if (!V::lanes(usable)) return kAll;

  Floats shares;
  for (int r = 0; r < kRows; ++r) {
    const double part = rows.k64[r] - std::floor(rows.k64[r]);
    shares[r] = (float)(part == 0 ? 1 : part < 0.5 ? part : 1 - part);
  }
  const auto reach = Logistic::reach<V>(V::div(finite, shares));
  const auto certain = Logistic::certain<float, V>(finite);
  Floats upper, lower, share;
  select_columns(given, rows, V::lanes(usable), &upper, &lower, &share);
  const auto gap = V::mul(V::sub(upper, lower), scale), middle = V::fma(half, upper, V::mul(half, lower));
  const auto is_wide = V::gt(gap, V::mul(V::set(2), V::add(reach, certain)));

  // Half way between scores next to each other there is no number: what its rounding leaves, as far as it matters.
  const auto twice = V::add(V::sub(upper, middle), V::sub(lower, middle)), most = V::set(1e4f);
  const auto off_middle = V::max(V::min(V::mul(V::mul(half, twice), scale), most), V::sub(zero, most));

  // What cannot be undecided between the ends of the bracket is left out: of every row, so that none depends on others.
  const Floats* x = rows.x;
  int64_t n = rows.n;
  double k64[kRows], decided[kRows] = {};
  Floats open[khot::kShort];
  if (n > kNarrow) {
    const auto margin = V::mul(V::add(reach, certain), temperature);
    n = pack_columns(given, V::lanes(usable), column_key(V::sub(lower, margin)), column_key(V::add(upper, margin)), open,
                     decided);
    x = open;
  }
  for (int r = 0; r < kRows; ++r) k64[r] = rows.k64[r] - decided[r];

  // Newton's method as in `balance`, each row for itself; τ = upper + T·shift.
  const float eps = Limits<float>::eps;
  const auto tolerance = V::set(std::sqrt(eps) / 10),
             rounding =
                 V::max(V::mul(V::set(eps / 8), V::min(rows.k, one)), V::set(Limits<float>::tiny * (float)rows.n));
  auto low = V::sub(zero, V::add(gap, reach)), high = reach, last = V::sub(high, low);
  // It begins half way between the two scores, or where those that are equal have what is left of k.
  const auto begin = V::log(V::div(V::sub(one, share), share));
  const auto is_tied = V::both(V::both(V::ge(zero, gap), V::gt(begin, low)), V::gt(high, begin));
  auto shift = V::blend(is_tied, begin, V::blend(is_wide, zero, V::mul(half, V::add(low, high)))), step = zero;
  auto active = V::but_not(usable, is_wide);
  const auto point = [&] {
    const auto anchor = V::blend(is_wide, middle, V::fma(temperature, shift, upper));
    return ColumnMargin{anchor, scale, V::blend(is_wide, off_middle, V::fnma(V::sub(anchor, upper), scale, shift))};
  };
  for (int i = 0; i < kMostSteps && V::lanes(active); ++i) {
    const ColumnTails t = tails(x, n, k64, point());
    const auto left = V::add(t.lower, V::max(t.excess, zero));
    const auto right = V::add(t.upper, V::max(V::sub(zero, t.excess), zero));
    const auto relative = V::div(t.difference, right);  // left/right − 1
    const auto quotient = V::min(V::max(V::div(left, right), V::set(1e-30f)), V::set(1e30f));
    const auto is_close = V::gt(V::set(1e-3f), V::abs(relative));
    const auto ratio = V::blend(is_close, V::fnma(V::mul(half, relative), relative, relative), V::log(quotient));
    const auto newton = V::div(ratio, V::add(V::div(t.lower_v, left), V::div(t.upper_v, right)));
    const auto is_root = V::ge(tolerance, V::abs(ratio)), is_equal = V::ge(rounding, V::abs(t.difference));
    step = V::blend(V::both(active, is_root), newton, step);
    active = V::but_not(active, V::either(is_root, is_equal));
    const auto is_low = V::gt(ratio, zero);  // τ must rise
    low = V::blend(is_low, shift, low);
    high = V::blend(is_low, high, shift);
    auto next = V::add(shift, newton);
    const auto is_inside = V::both(V::gt(next, low), V::gt(high, next));
    const auto is_short = V::ge(V::mul(half, last), V::abs(newton));
    next = V::blend(V::both(is_inside, is_short), next, V::mul(half, V::add(low, high)));
    last = V::abs(V::sub(next, shift));
    shift = V::blend(active, next, shift);
  }
  const unsigned solved = V::lanes(usable) & ~V::lanes(active);
  const ColumnMargin found = point();
  for (unsigned which = solved & ((1u << count) - 1); which; which &= which - 1) {
    const int r = __builtin_ctz(which);
    const Row<float>& row = given[r];
    const ColumnMargin here = {V::set(found.anchor[r]), V::set(found.scale[r]), V::set(found.shift[r])};
    float* p = out[r];
    const auto by = V::set(step[r]);
    Columns::in_blocks(rows.n, row.mask != nullptr, [&](auto at) {
      const auto t = here.of(at.scores(row)), tail = sigma_of<V>(V::abs(t));
      const auto y = V::blend(V::gt(V::set(0), t), V::sub(one, tail), tail);
      at.store(p, V::max(V::min(V::fnma(spread(tail), by, y), one), zero));
    });
  }
  keep(given, solved, found.anchor, V::add(found.shift, step));
  return ~solved & kAll;
}

}  // namespace
