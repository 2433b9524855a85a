// A soft top-k with costs: y = F((x/c − τ)/T) with Σ c·y = k; and its derivative.
//
// The scores per cost are stored once. Newton's method on log(left/right) of the two tails of sure.h, weighted with the
// costs, runs inside a bracket that only shrinks, as in _math/threshold.py; there are no order statistics to begin at,
// as they would be weighted too. A row without a clear finite threshold is left to that solver.
#pragma once

#include "long.h"

namespace {

constexpr int64_t kCostBlock = 8;  // costs are no whole numbers: short blocks keep their sums

// What is known of a row before it is solved: the costs of its finite scores and of those at +inf, and the mean and the
// variance of the finite ones, each of which counts as much as it costs.
struct Purse {
  double free, forced, mean, variance;
  bool is_bad;  // it has NaN, or a cost that is not positive and finite
};

// Stores x/c, or x if it is that already; −inf where it may not be chosen.
template <class V, class T> Purse price(const Row<T>& row, bool is_priced, T* s) {
  const T origin = first_finite(row, [&](int64_t i) { return row.x[i] / (is_priced ? 1 : row.costs[i]); });
  double sums[5];
  const auto body = [=](auto at, auto* lanes) {
    const auto zero = V::set(0), one = V::set(1), largest = V::set(Limits<T>::largest);
    const auto x = at.load(row.x, -std::numeric_limits<T>::infinity()), c = at.load(row.costs, 1);
    const auto may = V::ge(at.allowed(row, zero), zero);
    const auto priced = V::blend(may, is_priced ? x : V::div(x, c), V::set(-std::numeric_limits<T>::infinity()));
    const auto fine = V::both(V::both(V::gt(c, zero), V::ge(largest, c)), V::ge(x, x));
    const auto finite = V::ge(largest, V::abs(priced)), infinite = V::gt(priced, largest);
    const auto weight = V::keep(finite, c), off = V::keep(finite, V::sub(priced, V::set(origin)));
    const auto weighed = V::mul(weight, off);
    at.store(s, priced);
    lanes[0] = V::add(lanes[0], V::keep(V::but_not(may, fine), one));
    lanes[1] = V::add(lanes[1], weight);
    lanes[2] = V::add(lanes[2], V::keep(infinite, c));
    lanes[3] = V::add(lanes[3], weighed);
    lanes[4] = V::fma(weighed, off, lanes[4]);
  };
  accumulate_scores<V, 5>(row, sums, body);
  const double mean = sums[3] / sums[1], variance = sums[4] / sums[1] - mean * mean;
  return {sums[1], sums[2], (double)origin + mean, variance > 0 ? variance : 0, sums[0] > 0};
}

// The two sides of the equation at a point, and what rounding leaves of F there can be made up for by a step.
struct Weighed : Sides {
  double slope;  // Σ c·F′
  Weighed(const Tails& t, double k) : Sides(t, t.above - k), slope(t.lower_v + t.upper_v) {}
};

// The upper half of the digits of a float. Few such numbers, and few of the rests, are added up without a rounding, so
// that N − k has digits where few scores are undecided.
inline Floats upper_digits(Floats c) { return (Floats)((FloatBits)c & 0xfffff000u); }
inline Doubles upper_digits(Doubles c) { return c; }

// `row.x` holds x/c.
template <class F, class V, class T> Weighed weigh(const Row<T>& row, const Point<T>& point) {
  double sums[6];
  const F law = F::of(row);
  const Margin<T> margin(point, row.temperature);
  accumulate_row<V, 6, false, kCostBlock>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
    const auto x = at.load(row.x, -std::numeric_limits<T>::infinity());
    const auto c = V::keep(V::ge(x, V::set(-Limits<T>::largest)), at.load(row.costs));  // any bits under a mask
    const auto y = law.template at<V>(margin.template minus_z<V>(x));
    const auto tail = V::mul(c, y.tail), density = V::mul(c, y.density);
    lanes[0] = V::add(lanes[0], tail);
    lanes[1] = V::add(lanes[1], V::keep(y.above, tail));
    lanes[2] = V::add(lanes[2], density);
    lanes[3] = V::add(lanes[3], V::keep(y.above, density));
    const auto above = V::keep(y.above, c), most = upper_digits(above);
    lanes[4] = V::add(lanes[4], most);
    lanes[5] = V::add(lanes[5], V::sub(above, most));
  });
  const double lower = sums[0] - sums[1], lower_v = sums[2] - sums[3];  // may round to less than 0
  return {{lower > 0 ? lower : 0, sums[1], lower_v > 0 ? lower_v : 0, sums[3], sums[4] + sums[5]}, row.k};
}

template <class T> struct Edge {
  Point<T> point;
  double excess;  // Σ c·F − k there
  bool is_known;
};

template <class T> double distance(const Point<T>& from, const Point<T>& to, double temperature) {
  return ((double)to.anchor - (double)from.anchor) / temperature + (to.shift - from.shift);
}

// At `share` of the way between two points, exact even when anchors are neighbours or far apart.
template <class T> Point<T> between(const Point<T>& low, const Point<T>& high, double share, double temperature) {
  const Point<T> here = {(T)((1 - share) * (double)low.anchor + share * (double)high.anchor), 0};
  const double shift = (1 - share) * distance(here, low, temperature) + share * distance(here, high, temperature);
  return std::isfinite(shift) ? Point<T>::at((double)here.anchor, shift, temperature) : here;
}

struct Step {
  bool is_found;
  double on_ratio, on_sum;  // what is still missing at the point, in T: by log(left/right), and by Σ c·y − k
};

// The threshold of a row with 0 < k − forced < free, from `point` on.
template <class F, class V, class T> Step search(const Row<T>& row, const Purse& purse, Point<T>* point) {
  constexpr int most = 300;
  const double eps = (double)Limits<T>::eps, tolerance = F::is_smooth ? std::sqrt(eps) / 2 : 4 * eps,
               t = row.temperature;
  const double rest = row.k - purse.forced, inf = std::numeric_limits<double>::infinity();
  Edge<T> low = {*point, purse.free - rest, false}, high = {*point, -rest, false};
  double last = inf, last_ratio = inf;
  bool halve = true;
  for (int pass = 0; pass < most; ++pass) {
    const Weighed w = weigh<F, V>(row, *point);
    const double off = w.left - w.right, by_sum = w.slope > 0 ? off / w.slope : 0;
    if (!(off != 0 && std::isfinite(off))) return {off == 0, 0, 0};
    const double noise = w.left > 0 && w.left < 1 ? -4 * eps * std::log(w.left) : 0;
    const bool is_short = std::fabs(w.step) <= std::sqrt(eps) || !F::is_smooth;
    if (std::fabs(w.ratio) <= tolerance + noise && is_short) return {true, w.step, by_sum};
    (off > 0 ? low : high) = {*point, off, true};
    const double to_low = low.is_known ? distance(*point, low.point, t) : -inf;
    const double to_high = high.is_known ? distance(*point, high.point, t) : inf;
    const double finest = std::fabs(point->shift) > 1 || !F::is_smooth ? std::fabs(point->shift) : 1;
    const bool is_same = w.ratio == last_ratio && std::fabs(w.ratio) <= 1e-3;
    if (to_high - to_low <= eps * finest || is_same)
      return {std::fabs(off) <= 1e-3 * row.k + eps, std::isfinite(w.step) ? w.step : 0, by_sum};
    last_ratio = w.ratio;
    if (w.step > to_low && w.step < to_high && std::fabs(w.step) <= last / 2) {
      last = std::fabs(w.step);
      *point = point->moved(w.step, t);
      continue;
    }
    if (!low.is_known || !high.is_known) {  // all scores are above an end, or below
      const double few = rest < purse.free - rest ? rest : purse.free - rest, crowd = purse.free / few;
      const double reach = F::template reach<Scalar<double>>(crowd < 1e300 ? crowd : 1e300);
      if (!low.is_known) low.point = {part_at<V>(row.x, row.n, -Limits<T>::largest).from, -reach};
      if (!high.is_known) high.point = {part_at<V>(row.x, row.n, std::numeric_limits<T>::infinity()).below, reach};
      low.is_known = high.is_known = true;
    }
    double share = low.excess / (low.excess - high.excess);
    share = halve || !(share > 1e-3) ? (halve ? 0.5 : 1e-3) : share < 0.999 ? share : 0.999;
    *point = between(low.point, high.point, share, t);
    last = inf;
    halve = !halve;
  }
  return {false, 0, 0};
}

// The threshold that normal scores with such a mean and variance would have, about. A lane per row, and V may be one
// lane.
template <class F, class V, class R = typename V::reg>
R first_guess(R free, R mean, R variance, R rest, R temperature) {
  const R guess = normal_guess<V>(free, mean, variance, rest, temperature * V::set(F::width));
  return F::is_smooth ? guess : guess - temperature * V::set(0.5f);  // clip(z, 0, 1) has its middle there
}

template <class F, class T> Point<T> first_guess(const Row<T>& row, const Purse& purse) {
  const double tau =
      first_guess<F, Scalar<double>>(purse.free, purse.mean, purse.variance, row.k - purse.forced, row.temperature);
  return Point<T>::at(std::isfinite(tau) ? tau : 0, 0, row.temperature);
}

// Whether the row has a threshold that rounding of the sums above cannot move to infinity.
template <class T> bool is_clear(const Row<T>& row, const Purse& purse) {
  constexpr double margin = 4e-6;
  const double rest = row.k - purse.forced;
  return !purse.is_bad && row.temperature > 0 && rest > margin * purse.forced && rest < (1 - margin) * purse.free &&
         rest > 0 && std::isfinite(purse.free);
}

// y, or if x holds the scores per cost the margins z = (x − τ)/T; false, and nothing, if the row is left to another
// method.
template <class F, class V, class T> bool cost_row(Row<T> row, bool gives_margins, T* out) {
  const Purse purse = price<V>(row, gives_margins, out);
  if (!is_clear(row, purse)) return false;
  row.x = out;
  row.mask = nullptr;
  Point<T> point = first_guess<F>(row, purse);
  if (is_long(row)) {
    T scores[kSampleRow], costs[kSampleRow];
    Row<T> sample = sample_of(row, scores), of_costs = row;
    of_costs.x = row.costs;
    sample.costs = sample_of(of_costs, costs).x;
    Purse some = purse;
    some.free = some.forced = 0;
    for (int64_t i = 0; i < kSampleRow; ++i) {
      if (std::fabs(scores[i]) <= Limits<T>::largest)
        some.free += (double)costs[i];
      else if (scores[i] > 0)
        some.forced += (double)costs[i];
    }
    sample.k = some.forced + some.free * (row.k - purse.forced) / purse.free;
    Point<T> near = point;
    const Step step = some.free > 0 ? search<F, V>(sample, some, &near) : Step{false, 0, 0};
    if (step.is_found) point = near.moved(step.on_ratio, row.temperature);
  }
  const Step step = search<F, V>(row, purse, &point);
  if (!step.is_found) return false;
  double none[1];
  const F law = F::of(row);
  const Margin<T> margin(gives_margins ? point.moved(step.on_ratio, row.temperature) : point, row.temperature);
  const T give = (T)step.on_sum;
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
    const auto minus_z = margin.template minus_z<V>(at.load(row.x));
    if (gives_margins) return at.store(out, V::sub(V::set(0), minus_z));
    const auto f = law.template at<V>(minus_z);
    const auto y = V::blend(f.above, V::sub(V::set(1), f.tail), f.tail);
    at.store(out, V::min(V::max(V::fnma(f.density, V::set(give), y), V::set(0)), V::set(1)));
  });
  return true;
}

// The cotangent where v is not 0: elsewhere it may be anything.
template <class V, class R = typename V::reg> R wanted(R v, R g) { return V::keep(V::gt(v, V::set(0)), g); }

// dx = v(g/c − m)/T with m = Σvg/Σcv, which is dk. What has v = 0 may have any cost, and any g.
template <class F, class V, class T> double cost_pull_row(const Row<T>& row, const T* g, T* dx) {
  const F law = F::of(row);
  const T* y = row.x;
  const T* costs = row.costs;
  double sums[2];
  accumulate_row<V, 2, false, kCostBlock>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
    const auto v = law.template slope<V>(at.load(y));
    const auto weight = V::blend(V::not_lt(V::set(0), v), v, V::mul(v, at.load(costs)));
    lanes[0] = V::add(lanes[0], weight);
    lanes[1] = V::fma(v, wanted<V>(v, at.load(g)), lanes[1]);
  });
  const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
  double none[1];
  const T center = (T)mean, scale = (T)(1.0 / row.temperature);
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
    const auto v = law.template slope<V>(at.load(y));
    const auto moved = V::mul(V::mul(v, V::set(scale)), V::sub(V::div(at.load(g), at.load(costs)), V::set(center)));
    at.store(dx, V::blend(V::not_lt(V::set(0), v), v, moved));
  });
  return mean;
}

}  // namespace
