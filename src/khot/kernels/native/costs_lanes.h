// Short rows with costs side by side, and their derivative: what costs.h does, a lane per row. No step depends on the
// other rows, so neither does a result. Rows that do not settle are left to it.
#pragma once

#include "costs.h"
#include "lanes.h"

namespace {

// Short rows as columns of scores per cost and of costs, 1 where a score may not be chosen; and what is known of them.
struct PricedColumns : Columns {
  Floats c[khot::kShort];
  Total free, forced;                                                                     // as in Purse
  Floats mean, variance;                                                                  // likewise
  Floats least = V::set(Limits<float>::largest), most = V::set(-Limits<float>::largest);  // of the finite scores
  FloatMask is_fine{};  // no NaN, and costs that are positive and neither tiny nor huge

  PricedColumns(const Row<float>* rows, bool is_priced) : Columns(rows, [](const Floats*, int64_t) {}) {
    load_costs(rows);
    const int64_t length = n;
    const auto zero = V::set(0), one = V::set(1), largest = V::set(Limits<float>::largest);
    const auto cheapest = V::set(1e-30f), dearest = V::set(1e30f);
    is_fine = ~is_fine;
    const auto first = is_priced ? x[0] : V::div(x[0], c[0]);
    const auto origin = V::keep(V::ge(largest, V::abs(first)), first);
    Floats drifts = zero, squares = zero;
    for (int64_t j = 0; j < length; j += kCostBlock) {
      Floats some_free = zero, some_forced = zero;
      for (int64_t i = j; i < j + kCostBlock && i < length; ++i) {
        const auto s = is_priced ? x[i] : V::div(x[i], c[i]);
        x[i] = s;
        is_fine = V::both(is_fine, V::both(V::both(V::ge(c[i], cheapest), V::ge(dearest, c[i])), V::ge(s, s)));
        const auto finite = V::ge(largest, V::abs(s)), infinite = V::gt(s, largest);
        const auto weight = V::keep(finite, c[i]), off = V::keep(finite, V::sub(s, origin)),
                   weighed = V::mul(weight, off);
        some_free = V::add(some_free, weight);
        some_forced = V::add(some_forced, V::keep(infinite, c[i]));
        drifts = V::add(drifts, weighed);
        squares = V::fma(weighed, off, squares);
        least = V::min(least, V::blend(finite, s, least));
        most = V::max(most, V::blend(finite, s, most));
      }
      free.add(some_free);
      forced.add(some_forced);
    }
    const auto inverse = V::div(one, free.rounded()), drift = V::mul(drifts, inverse);
    mean = V::add(origin, drift);
    variance = V::max(V::fnma(drift, drift, V::mul(squares, inverse)), zero);
  }

 private:
  void load_costs(const Row<float>* rows) {
    const int64_t length = n;
    const bool is_masked = rows->mask != nullptr;
    if (!is_masked && rows[0].costs == rows[1].costs) {  // all have the same; the first may stand again at the end
      const float* costs = rows->costs;
      for (int64_t j = 0; j < length; ++j) c[j] = V::set(costs[j]);
      return;
    }
    in_blocks(length, is_masked, [&](auto at) {
      Floats* block = c + at.i;
      for (int r = 0; r < kRows; ++r) {
        const auto may = V::ge(at.allowed(rows[r], V::set(0)), V::set(0));
        block[r] = V::blend(may, at.load(rows[r].costs, 1), V::set(1));
      }
      transpose(block);
    });
  }
};

struct WeighedColumns {
  Floats lower, upper, lower_v, upper_v;  // as in Tails
  Floats excess, off;                     // N − k, and left − right, rounded once
};

// The cdf at −z, which of the logistic cdf is in units of ln 2.
template <class F> At<Vec<float>> at_margin(const F& law, Floats minus_z) {
  using V = Vec<float>;
  if constexpr (F::is_logistic) {
    const auto tail = sigma_of<V>(V::abs(minus_z));
    return {tail, V::fnma(tail, tail, tail), V::gt(V::set(0), minus_z)};
  } else {
    return law.template at<V>(minus_z);
  }
}

// Also stores y and F′ of all columns.
template <class F> WeighedColumns weigh(const PricedColumns& rows, const F& law, Floats anchor, Floats scale,
                                        Floats shift, Floats* y, Floats* slopes) {
  using V = Vec<float>;
  const auto zero = V::set(0), one = V::set(1), unit = V::set(F::is_logistic ? (float)(1 / kLn2) : 1);
  scale = V::mul(scale, unit), shift = V::mul(shift, unit);
  Total lower, upper, above;
  Floats lower_v = zero, upper_v = zero;
  for (int64_t j = 0; j < rows.n; j += kCostBlock) {
    Floats low = zero, high = zero, number = zero, digits = zero;
    for (int64_t i = j; i < j + kCostBlock && i < rows.n; ++i) {
      const auto f = at_margin(law, V::fma(V::sub(anchor, rows.x[i]), scale, shift));
      const auto c = rows.c[i], tail = V::mul(c, f.tail), density = V::mul(c, f.density), most = upper_digits(c);
      y[i] = V::blend(f.above, V::sub(one, f.tail), f.tail);
      slopes[i] = f.density;
      low = V::blend(f.above, low, V::add(low, tail));
      high = V::blend(f.above, V::add(high, tail), high);
      lower_v = V::blend(f.above, lower_v, V::add(lower_v, density));
      upper_v = V::blend(f.above, V::add(upper_v, density), upper_v);
      number = V::blend(f.above, V::add(number, most), number);  // N − k must have digits where few are undecided
      digits = V::blend(f.above, V::add(digits, V::sub(c, most)), digits);
    }
    above.add(number);
    above.add(digits);
    lower.add(low);
    upper.add(high);
  }
  const Total off = lower.minus(upper).plus(above);
  return {lower.rounded(), upper.rounded(), lower_v, upper_v, above.less(rows.k64), off.less(rows.k64)};
}

// Where each row is searched: τ = anchor + T·shift, and the bracket around it, in T from there.
struct LaneSearch {
  using V = Vec<float>;
  Floats anchor, shift, low, high;
  Floats low_off, high_off;  // Σ c·F − k at the ends

  void move(FloatMask active, Floats step, Floats temperature, Floats scale) {
    const auto off = V::add(step, shift), moved = V::fma(off, temperature, anchor);  // as near as an anchor can be
    const auto rest = V::mul(V::fma(off, temperature, V::sub(anchor, moved)), scale);
    shift = V::blend(active, rest, shift);  // a point that is found must not move by a rounding
    anchor = V::blend(active, moved, anchor);
    low = V::sub(low, step);
    high = V::sub(high, step);
  }
};

constexpr int kMostWeighings = 20;

// The lanes whose row has a threshold that rounding of the sums cannot move to infinity, and can be found by floats.
inline unsigned clear_lanes(const Row<float>* given, const PricedColumns& rows, double* rest) {
  double free[kRows], forced[kRows];
  rows.free.store(free);
  rows.forced.store(forced);
  unsigned clear = Vec<float>::lanes(rows.is_fine);
  for (int r = 0; r < kRows; ++r) {
    rest[r] = rows.k64[r] - forced[r];
    const double t = given[r].temperature;
    const bool is_usual = t > 1e-30 && t < 1e30 && rest[r] > 1e-30;
    if (!(is_usual && is_clear(given[r], {free[r], forced[r], 0, 0, false}))) clear &= ~(1u << r);
  }
  return clear;
}

// Solves kRows rows; y or the margins are written for those whose bit is NOT set in the result.
template <class F> unsigned cost_group(const Row<float>* given, bool gives_margins, float* const* out) {
  using V = Vec<float>;
  const float eps = Limits<float>::eps;
  const auto zero = V::set(0), one = V::set(1), half = V::set(0.5f), most = V::set(1e30f);
  const auto tolerance = V::set(F::is_smooth ? std::sqrt(eps) / 2 : 4 * eps), short_step = V::set(std::sqrt(eps));
  PricedColumns rows(given, gives_margins);
  double rests[kRows];
  const unsigned clear = clear_lanes(given, rows, rests);
  if (!clear) return (1u << kRows) - 1;
  float narrow[kRows];
  for (int r = 0; r < kRows; ++r) narrow[r] = (float)rests[r];
  const F law = F::of(*given);
  const auto free = rows.free.rounded(), rest = V::load(narrow), temperature = rows.temperature;
  const auto scale = V::div(one, temperature);
  const auto few = V::min(rest, V::sub(free, rest)), reach = F::template reach<V>(V::min(V::div(free, few), most));

  LaneSearch at;
  at.shift = zero;
  at.anchor = first_guess<F, V>(free, rows.mean, rows.variance, rest, temperature);
  at.anchor = V::keep(V::ge(V::set(Limits<float>::largest), V::abs(at.anchor)), at.anchor);
  at.low = V::sub(V::mul(V::sub(rows.least, at.anchor), scale), reach);
  at.high = V::add(V::mul(V::sub(rows.most, at.anchor), scale), reach);
  at.low_off = V::sub(free, rest), at.high_off = V::sub(zero, rest);
  auto last = V::set(std::numeric_limits<float>::infinity()), give = zero;
  FloatMask active = V::gt(zero, zero), halve = active;
  for (int r = 0; r < kRows; ++r) active[r] = clear >> r & 1 ? -1 : 0;
  halve = ~halve;
  Floats y[khot::kShort], slopes[khot::kShort];
  for (int pass = 0; pass < kMostWeighings; ++pass) {
    const WeighedColumns w = weigh(rows, law, at.anchor, scale, at.shift, y, slopes);
    const auto left = V::add(w.lower, V::max(w.excess, zero)),
               right = V::add(w.upper, V::max(V::sub(zero, w.excess), zero));
    const auto relative = V::div(w.off, right);  // left/right − 1
    const auto quotient = V::min(V::max(V::div(left, right), V::set(1e-30f)), most);
    const auto is_close = V::gt(V::set(1e-3f), V::abs(relative));
    const auto ratio = V::blend(is_close, V::fnma(V::mul(half, relative), relative, relative), V::log(quotient));
    const auto newton = V::div(ratio, V::add(V::div(w.lower_v, left), V::div(w.upper_v, right)));
    const auto by_sum = V::div(w.off, V::add(w.lower_v, w.upper_v));
    const auto is_equal = V::both(V::ge(w.off, zero), V::ge(zero, w.off));
    const auto toward = F::is_smooth ? newton : by_sum;
    auto is_root = V::ge(tolerance, V::abs(ratio));
    if constexpr (F::is_smooth) is_root = V::both(is_root, V::ge(short_step, V::abs(newton)));
    give = V::blend(V::both(active, is_root), gives_margins ? newton : by_sum, give);
    give = V::blend(V::both(active, is_equal), zero, give);
    active = V::but_not(active, V::either(is_root, is_equal));
    if (!V::lanes(active)) break;
    // Newton's step if it stays inside the bracket and is half as long as the last; else by the sums at the ends, and
    // half way, in turns.
    const auto is_low = V::gt(w.off, zero);  // τ must rise
    at.low = V::blend(is_low, zero, at.low), at.low_off = V::blend(is_low, w.off, at.low_off);
    at.high = V::blend(is_low, at.high, zero), at.high_off = V::blend(is_low, at.high_off, w.off);
    const auto is_inside = V::both(V::gt(toward, at.low), V::gt(at.high, toward));
    const auto is_good = V::both(is_inside, V::ge(V::mul(half, last), V::abs(toward)));
    const auto part = V::div(at.low_off, V::sub(at.low_off, at.high_off));
    const auto share = V::blend(halve, half, V::max(V::min(part, V::set(0.999f)), V::set(1e-3f)));
    const auto between = V::fma(share, V::sub(at.high, at.low), at.low);
    last = V::blend(is_good, V::abs(toward), V::set(std::numeric_limits<float>::infinity()));
    halve ^= ~is_good;
    at.move(active, V::blend(is_good, toward, between), temperature, scale);
  }
  const unsigned solved = clear & ~V::lanes(active);
  for (int64_t j = 0; j < rows.n; ++j) {
    if (gives_margins) {
      const auto minus_z = V::fma(V::sub(at.anchor, rows.x[j]), scale, V::add(at.shift, give));
      y[j] = V::sub(zero, minus_z);
    } else {
      y[j] = V::min(V::max(V::fnma(slopes[j], give, y[j]), zero), one);
    }
  }
  rows.store(solved, y, out);
  return ~solved & ((1u << kRows) - 1);
}

// The derivative of up to kRows short rows, whose sums share a vector; dx holds v between the two passes.
template <class F>
void cost_pull_short(const Row<float>* rows, int count, const float* const* g, float* const* dx, double* dk) {
  using V = Vec<float>;
  const int64_t n = rows->n;
  const F law = F::of(*rows);
  Doubles weights[kRows] = {}, sums[kRows] = {};
  for (int r = 0; r < count; ++r) {
    const float *y = rows[r].x, *c = rows[r].costs, *h = g[r];
    float* to = dx[r];
    V::wide weight, sum;
    for (int64_t i = 0; i < n;) {
      const int64_t stop = i + kCostBlock * kRows < n ? i + kCostBlock * kRows : n, full = stop - (stop - i) % kRows;
      Floats some_weight{}, some_sum{};
      const auto add = [&](auto at) {
        const auto v = law.template slope<V>(at.load(y));
        at.store(to, v);
        some_weight = V::add(some_weight, V::blend(V::not_lt(V::set(0), v), v, V::mul(v, at.load(c))));
        some_sum = V::fma(v, wanted<V>(v, at.load(h)), some_sum);
      };
      for (; i < full; i += kRows) add(Full<V>{i});
      if (full < stop) add(Part<V>{full, stop - full});
      weight.add(some_weight);
      sum.add(some_sum);
      i = stop;
    }
    weights[r] = weight.v, sums[r] = sum.v;
  }
  for (int r = 0; r < kRows; r += kRows / 2) {
    const Doubles w = row_sums(weights + r), s = row_sums(sums + r);
    Vec<double>::store(dk + r, Vec<double>::blend(w == 0, Doubles{}, s / w));
  }
  for (int r = 0; r < count; ++r) {
    const float *c = rows[r].costs, *h = g[r];
    float* to = dx[r];
    const auto center = V::set((float)dk[r]), scale = V::set((float)(1.0 / rows[r].temperature));
    const auto write = [=](auto at) {
      const auto v = at.load(to);
      const auto moved = V::mul(V::mul(v, scale), V::sub(V::div(at.load(h), at.load(c)), center));
      at.store(to, V::blend(V::not_lt(V::set(0), v), v, moved));
    };
    const int64_t full = n - n % kRows;
    for (int64_t i = 0; i < full; i += kRows) write(Full<V>{i});
    if (full < n) write(Part<V>{full, n - full});
  }
}

}  // namespace
