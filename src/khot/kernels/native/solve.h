// One row of a soft top-k: y = F((x − τ)/T) with Σy = k, the quick way or the sure one.
#pragma once

#include "quick.h"
#include "sure.h"

namespace {

// Whether the row has no finite threshold.
template <class T> bool is_settled(const Row<T>& row, const Census& census) {
  const double rest = row.k - (double)census.infinite;
  return census.nan || !(row.temperature > 0 && rest > 0 && rest < (double)census.finite);
}

// Writes the p of such a row.
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
  const Margin<T> margin(point, row.temperature);
  accumulate_scores<V, 1>(row, none, [=](auto at, auto*) {
    const auto f = F::template at<V>(margin.template minus_z<V>(at.scores(row)));
    const auto y = V::blend(f.above, V::sub(V::set(1), f.tail), f.tail);
    const auto moved = V::fnma(f.density, V::set(small), y);
    at.store(out, V::max(V::blend(V::gt(moved, V::set(1)), V::set(1), moved), V::set(0)));
  });
}

template <class F, class V, class T> void solve_row(const Row<T>& row, T* p) {
  Point<T> point;
  if (F::is_logistic && solve_quickly<V>(row, p, false, &point)) return;
  const Census census = count_kinds<V>(row);
  if (is_settled(row, census)) return settle(row, census, p);
  const Balance found = locate<F, V>(row, census, true, p, &point);
  write<F, V>(row, point, found.step, p);
}

// z = (x − τ)/T. False, and z holds nothing, where the threshold is infinite, or is decided by numbers too small to be
// summed.
template <class V, class T> bool margin_row(const Row<T>& row, T* z) {
  Point<T> point;
  if (!solve_quickly<V>(row, z, false, &point)) {
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
