// One row of a soft top-k: y = F((x − τ)/T) with Σy = k, the quick way or the sure one.
#pragma once

#include "long.h"

namespace {

// Writes the p of a row that has no finite threshold.
template <class T> void settle(const Row<T>& row, const Census& census, T* p) {
  const double k = row.k, rest = k - (double)census.infinite;
  const T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  if (census.nan || !(k >= 0 && rest <= (double)census.finite && row.temperature > 0)) {
    for (int64_t i = 0; i < row.n; ++i) p[i] = nan;
  } else if (rest <= 0) {  // the entries of +inf share k; at most 1 each, and then exactly 1
    const T share = census.infinite ? (T)(k / (double)census.infinite) : T(0);
    for (int64_t i = 0; i < row.n; ++i) p[i] = allowed(row, i) && row.x[i] == inf ? share : T(0);
  } else {
    for (int64_t i = 0; i < row.n; ++i) p[i] = allowed(row, i) && row.x[i] > -inf ? T(1) : T(0);
  }
}

// y = F(z − step) written from its smaller tail, so that 0 and 1 are exact; the step is so small that its square is
// nothing.
template <class F, class V, class T> void write(const Row<T>& row, const Point<T>& point, double step, T* out) {
  double none[1];
  const T small = (T)step;
  const F law = F::of(row);
  const Margin<T> margin(point, row.temperature);
  accumulate_scores<V, 1>(row, none, [=](auto at, auto*) {
    const auto f = law.template at<V>(margin.template minus_z<V>(at.scores(row)));
    const auto y = V::blend(f.above, V::sub(V::set(1), f.tail), f.tail);
    const auto moved = V::fnma(f.density, V::set(small), y);
    at.store(out, V::max(V::blend(V::gt(moved, V::set(1)), V::set(1), moved), V::set(0)));
  });
}

// The quick way for the other cdfs: the threshold of a sample, and Newton's method from there, whose last sum is that of
// what is stored. False if it is not settled; then y holds nothing.
template <class F, class V, class T> bool solve_from_sample(const Row<T>& row, T* y) {
  const double n = (double)row.n, eps = (double)Limits<T>::eps, short_step = 3 * std::sqrt(eps);  // its square is nothing
  if (!is_long(row) || !(row.k > 0 && row.k < n && row.temperature > 0)) return false;
  const F law = F::of(row);
  const Row<T> part = sample_of(row, y);
  Point<T> point;
  if (!sample_root<F, V>(part, y + kSampleRow, &point)) return false;
  double step = 0;
  // The smaller of y and 1 − y is summed: numbers near 1 would round the sum's digits away.
  const bool complement = 2 * row.k > n;
  const double k = complement ? n - row.k : row.k;
  double sums[2];
  bool is_stored = false;  // whether y holds the last point's numbers
  const auto settles = [&] {
    const double noise = 2 * eps * std::sqrt(k < 1 ? k * k : k), limit = 4 * eps * (sums[1] < k ? sums[1] : k);
    return noise <= 4 * limit && std::fabs(sums[0] - k) <= (limit > noise ? limit : noise);
  };
  for (int pass = 0; pass < 6 && std::fabs(step) < 1; ++pass) {
    point = point.moved(step, row.temperature);
    const Margin<T> margin(point, row.temperature);
    const auto value = [=](auto at, typename V::reg* density) {
      const auto f = law.template at<V>(margin.template minus_z<V>(at.scores(row)));
      const auto rest = V::sub(V::set(1), f.tail);
      *density = f.density;
      return complement ? V::blend(f.above, f.tail, rest) : V::blend(f.above, rest, f.tail);
    };
    const auto store = [=](auto at) {
      typename V::reg none;
      at.store(y, value(at, &none));
    };
    bool has_moved = false;
    if constexpr (F::has_moves && sizeof(T) == 4) {  // doubles need more digits than a move has
      has_moved = is_stored && std::fabs(step) < F::most_step;
      const double by = complement ? step : -step;
      const T grow = (T)std::exp(by), fall = (T)std::exp(-by);
      if (has_moved) accumulate_row<V, 2>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
        const auto q = F::template moved<V>(at.load(y), grow, fall);
        at.store(y, q);
        lanes[0] = V::add(lanes[0], q);
        lanes[1] = V::add(lanes[1], law.template slope<V>(q));
      });
    }
    if (has_moved) {
      // All is done, without an exponential.
    } else if constexpr (F::has_simple_slope) {
      accumulate_scores<V, 2>(row, sums, [=](auto at, auto* lanes) {
        const auto q = at.load(y);
        lanes[0] = V::add(lanes[0], q);
        lanes[1] = V::add(lanes[1], law.template slope<V>(q));
      }, store);
    } else {
      accumulate_scores<V, 2>(row, sums, [=](auto at, auto* lanes) {
        typename V::reg density;
        const auto q = value(at, &density);
        at.store(y, q);
        lanes[0] = V::add(lanes[0], at.live(q));
        lanes[1] = V::add(lanes[1], at.live(density));
      });
    }
    is_stored = true;
    if (!(sums[1] > 0)) return false;
    if (settles() && !complement) return keep(row, point), true;
    step = settles() ? 0 : (sums[0] - k) / sums[1];
    // A short step is taken along the slope. The sum of that decides; if it does not, all is computed anew.
    if (std::fabs(step) < short_step && (step == 0 || F::has_simple_slope)) {
      const T by = (T)-step;
      is_stored = false;
      accumulate_row<V, 1>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
        auto q = at.load(y);
        if constexpr (F::has_simple_slope) {
          q = V::fma(law.template slope<V>(q), V::set(by), q);
          q = V::min(V::max(q, V::set(0)), V::set(1));
        }
        lanes[0] = V::add(lanes[0], q);
        at.store(y, complement ? V::sub(V::set(1), q) : q);
      });
      if (settles()) return keep(row, point.moved(complement ? -step : step, row.temperature)), true;
    }
    if (complement) step = -step;
  }
  return false;
}

template <class F, class V, class T> void solve_row(const Row<T>& row, T* p) {
  Point<T> point;
  if constexpr (F::is_logistic) {
    if (!row.is_sharp && (is_long(row) ? solve_long<V>(row, true, p, &point) : solve_quickly<V>(row, p, false, &point)))
      return keep(row, point);
    if constexpr (sizeof(T) == 4)  // from here on floats are read, often several times
      if (row.kept && row.kept->x) widen(row.kept->dtype, row.kept->x, row.n, row.threads, const_cast<float*>(row.x));
  } else if (solve_from_sample<F, V>(row, p)) {
    return;
  }
  const Census census = count_kinds<V>(row);
  if (is_settled(row, census)) return settle(row, census, p);
  const Balance found = locate<F, V>(row, census, true, p, &point);
  write<F, V>(row, point, found.step, p);
  keep(row, point.moved(found.step, row.temperature));
}

// z = (x − τ)/T. False, and z holds nothing, where the threshold is infinite, or is decided by numbers too small to be
// summed.
template <class V, class T> bool margin_row(const Row<T>& row, T* z) {
  Point<T> point;
  if (!(is_long(row) ? solve_long<V>(row, false, z, &point) : solve_quickly<V>(row, z, false, &point))) {
    const Census census = count_kinds<V>(row);
    if (is_settled(row, census)) return false;
    const Balance found = locate<Logistic, V>(row, census, false, z, &point);
    if (!found.is_root) return false;
    point = point.moved(found.step, row.temperature);
  }
  double none[1];
  const Margin<T> margin(point, row.temperature);
  accumulate_scores<V, 1>(row, none, [=](auto at, auto*) {
    at.store(z, V::sub(V::set(0), margin.template minus_z<V>(at.scores(row))));
  });
  return true;
}

}  // namespace
