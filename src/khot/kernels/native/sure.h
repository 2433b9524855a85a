// The sure way to the threshold, for every row that has one and for every cdf of cdfs.h.
//
// The two order statistics around k bracket τ within a few dozen T, the scores that can still be undecided there are
// gathered, and Newton's method with bisection balances the two tails, Σ_{z≤0} F(z) + (N−k)⁺ = Σ_{z>0} (1 − F(z)) +
// (N−k)⁻, in which nothing cancels. N is the number of scores above τ.
#pragma once

#include "cdfs.h"
#include "point.h"
#include "select.h"

namespace {

struct Tails {
  double lower, upper, lower_v, upper_v,
      above;  // Σ tail and Σ tail(1 − tail) on either side of τ, and the number above
};

template <class F, class V, class T>
Tails tails(const Row<T>& row, const Point<T>& point) {
  double sums[5];
  const F f = F::of(row);
  const Margin<T> margin(point, row.temperature);
  accumulate_scores<V, 5>(row, sums, [=](auto at, auto* lanes) {
    const auto y = f.template at<V>(margin.template minus_z<V>(at.scores(row)));
    lanes[0] = V::add(lanes[0], y.tail);
    lanes[1] = V::add(lanes[1], V::keep(y.above, y.tail));
    lanes[2] = V::add(lanes[2], y.density);
    lanes[3] = V::add(lanes[3], V::keep(y.above, y.density));
    lanes[4] = V::add(lanes[4], V::keep(y.above, V::set(1)));
  });
  const double lower = sums[0] - sums[1], lower_v = sums[2] - sums[3];  // may round to less than 0
  return {lower > 0 ? lower : 0, sums[1], lower_v > 0 ? lower_v : 0, sums[3], sums[4]};
}

// The two sides of the equation, log(left/right), and Newton's step on it in units of T; `excess` is N − k.
struct Sides {
  double left, right, ratio, step;
  Sides(const Tails& t, double excess)
      : left(t.lower + (excess > 0 ? excess : 0)), right(t.upper + (excess < 0 ? -excess : 0)),
        ratio(std::log(left) - std::log(right)) {
    const double slope = t.lower_v / left + t.upper_v / right;
    step = slope == 0 ? 0 : ratio / slope;  // a density may underflow
  }
};

constexpr int kMostPasses = 200;  // the bracket is a few hundred T wide, and float64 has 52 bits

struct Balance {
  bool is_root;  // log(left/right) = 0 to rounding; else the two sides agree as far as p can tell, or nothing is known
  double step;   // what is still missing at the point, in units of T
};

// Newton's method on log(left/right) inside a bracket of shifts, from `start` or else from its middle. `decided` scores
// lie above. `tails_at` gives the sums of the row at a point.
template <class F, class T, class At> Balance balance(const Row<T>& row, double decided, bool just_p, double anchor,
                                                      double low, double high, double start, Point<T>* point, At tails_at,
                                                      int passes = kMostPasses) {
  const double k = row.k;
  const double eps = (double)Limits<T>::eps, tolerance = F::is_smooth ? std::sqrt(eps) / (just_p ? 1 : 10) : 4 * eps;
  double shift = start > low && start < high ? start : low / 2 + high / 2, last = high - low;
  for (int i = 0; i < passes; ++i) {
    *point = Point<T>::at(anchor, shift, row.temperature);
    const Tails t = tails_at(*point);
    const auto [left, right, ratio, step] = Sides(t, decided + t.above - k);
    const double underflow = (double)Limits<T>::tiny * (double)row.n, rounding = just_p ? eps / 8 * (k < 1 ? k : 1) : 0;
    // Newton's last step errs by its square, and is longer than the ratio where most tails are decided.
    const bool is_short = std::fabs(step) <= std::sqrt(eps) || !F::is_smooth;
    if (std::fabs(ratio) <= tolerance && is_short) return {left > underflow / eps && right > underflow / eps, step};
    // Entries err all in one direction, so none is off by more than |left − right|.
    if (std::fabs(left - right) <= (rounding > underflow ? rounding : underflow)) return {false, 0};
    (ratio > 0 ? low : high) = shift;
    const double ends = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
    if (high - low <= 2 * Limits<double>::eps * ends) return {false, 0};  // no room is left
    double next = shift + step;
    if (!(next > low && next < high && std::fabs(step) <= 0.75 * last)) next = low / 2 + high / 2;
    last = std::fabs(next - shift);
    shift = next;
  }
  // A bracket halved so often is a point. With a slope that has a bound this cannot be, and must not pass for an
  // answer.
  return {false, F::is_smooth ? std::numeric_limits<double>::quiet_NaN() : 0};
}

// Where to start: the root of a sample of the scores. `beyond` of them are above the anchor, and k is asked of them; the
// sample is asked for as many more or fewer than it has above: what it has there by chance does not matter. If it has few
// scores near the anchor, all that are there are taken in their place.
template <class F, class V, class T> double start_of(const Row<T>& row, double beyond, double k, T* room, int64_t places,
                                                     double anchor, double low, double high, Point<T>* point) {
  constexpr int64_t least = 1024, most = 16384;
  constexpr double few = 256, near = 14;
  const int64_t size = places / 2 < most ? places / 2 : most, step = size > 0 ? row.n / size : 0;
  const double none = low / 2 + high / 2, weight = size > 0 ? (double)row.n / (double)size : 0;
  if (size < least || step < 4) return none;
  const T top = (T)(anchor + near * row.temperature), bottom = (T)(anchor - near * row.temperature);
  const auto is_near = [=](auto x) { return V::both(V::ge(V::set(top), x), V::ge(x, V::set(bottom))); };
  double close = 0;
  for (int64_t i = 0; i < size; ++i) {
    room[i] = row.x[i * step];
    close += room[i] <= top && room[i] >= bottom;
  }
  Row<T> sample = {room, nullptr, 0, size, 0, row.temperature, 1, row.exponent}, all = sample;
  all.x = room + size, all.n = 0;
  if (close < few) {
    for (int64_t i = 0; i < row.n; i += kChunk) {
      const int64_t count = row.n - i < kChunk ? row.n - i : kChunk;
      if (size + all.n + count > places) return none;
      const T* from = row.x + i;
      all.n += pack_row<V>(count, room + size + all.n, [=](auto at, auto* x) { return *x = at.load(from), is_near(*x); });
    }
    sample.n = pack_row<V>(size, room, [=](auto at, auto* x) { return *x = at.load(room), ~is_near(*x); });
  }
  const auto tails_at = [&](const Point<T>& at) {
    const Tails a = tails<F, V>(all, at), b = tails<F, V>(sample, at);
    return Tails{a.lower + weight * b.lower, a.upper + weight * b.upper, a.lower_v + weight * b.lower_v,
                 a.upper_v + weight * b.upper_v, a.above + weight * b.above};
  };
  const Point<T> first = Point<T>::at(anchor, 0, row.temperature);
  Row<T> asked = row;
  asked.k = tails_at(first).above + k - beyond;
  if (!balance<F>(asked, 0, true, anchor, low, high, none, point, tails_at, 16).is_root) return none;
  // The sums of the sample vary by Σ tail² and the number of scores between, and change by v in a T.
  const Tails t = tails_at(*point), part = tails<F, V>(sample, *point);
  const double v = t.lower_v + t.upper_v, passed = std::fabs(part.above - tails<F, V>(sample, first).above);
  const double variance = weight * weight * (part.lower + part.upper - part.lower_v - part.upper_v + passed);
  if (!(4 * variance < v * v)) return none;
  return ((double)point->anchor - anchor) / row.temperature + point->shift;
}

// Whether the row has no finite threshold.
template <class T> bool is_settled(const Row<T>& row, const Census& census) {
  const double rest = row.k - (double)census.infinite;
  return census.nan || !(row.temperature > 0 && rest > 0 && rest < (double)census.finite);
}

// The rows that have a finite threshold: where it is, or if just p is wanted, where it might as well be. p serves as
// scratch space.
template <class F, class V, class T>
Balance locate(const Row<T>& row, const Census& census, bool just_p, T* p, Point<T>* point) {
  const double k = row.k - (double)census.infinite, part = k - std::floor(k), finite = (double)census.finite;
  const double share = part == 0 ? 1 : (part < 0.5 ? part : 1 - part);
  using One = Scalar<double>;
  const double crowd = One::min(finite / share, 1e300), reach = F::template reach<One>(crowd),
               certain = F::template certain<T, One>(finite);
  T upper, lower;
  const bool is_whole = census.finite == row.n && !row.mask;
  if (!is_whole) gather<V>(row, true, p);
  select_ranks<V>(is_whole ? row.x : p, census.finite, row.threads, (int64_t)std::ceil(k), (int64_t)std::floor(k) + 1,
                  p, &upper, &lower);
  const double gap = ((double)upper - (double)lower) / row.temperature, middle = (double)upper / 2 + (double)lower / 2;
  const bool is_wide = gap > 2 * (reach + certain);
  if (is_wide && just_p) {
    *point = Point<T>::at(middle, 0, row.temperature);
    return {false, 0};
  }
  const double margin = (reach + certain) * row.temperature;
  const T high = (T)((double)upper + margin), low = (T)((double)lower - margin);
  int64_t decided = 0, beyond = 0;  // above the bracket, and above x_(⌈k⌉)
  const int64_t open = pack_scores<V>(row, p, [&decided, &beyond, high, low, upper, &row](auto at, auto* x) {
    *x = at.scores(row);
    decided += __builtin_popcount(V::lanes(V::gt(*x, V::set(high))));
    beyond += __builtin_popcount(V::lanes(V::gt(*x, V::set(upper))));
    return V::both(V::ge(V::set(high), *x), V::ge(*x, V::set(low)));
  });
  // Where all are undecided they need no copy, and p is free.
  const bool is_copy = !is_whole || open < row.n;
  const Row<T> undecided = {is_copy ? p : row.x, nullptr, 0, open, row.k, row.temperature, row.threads, row.exponent};
  if (is_wide) {  // each tail is exponential in τ, and balances the other half way between two points at which they are
                  // equal
    const auto near_lower = Point<T>::at((double)lower, certain, row.temperature);
    const auto near_upper = Point<T>::at((double)upper, -certain, row.temperature);
    const double left = tails<F, V>(undecided, near_lower).lower, right = tails<F, V>(undecided, near_upper).upper;
    const double lost = (((double)upper - middle) - (middle - (double)lower)) / 2 / row.temperature;  // by rounding
    const double shift = (std::log(left) - std::log(right)) / 2;
    *point = Point<T>::at(middle, std::isfinite(lost) ? shift + lost : shift, row.temperature);
    return {true, 0};
  }
  T* room = is_copy ? p + open : p;
  const double start = start_of<F, V>(undecided, (double)(beyond - decided), row.k - (double)decided, room,
                                      p + row.n - room, (double)upper, -gap - reach, reach, point);
  return balance<F>(undecided, (double)decided, just_p, (double)upper, -gap - reach, reach, start, point,
                    [&](const Point<T>& at) { return tails<F, V>(undecided, at); });
}

}  // namespace
