// Statistical top-k: what exceeds a threshold that the mean and the deviation of a row give.
#pragma once

#include "select.h"

namespace {

// mean + std·row.k
template <class V, class T> double statistical_cutoff(const Row<T>& row) {
  const T* x = row.x;
  double sum[1], square[1];
  accumulate_row<V, 1>(row.n, row.threads, sum, [=](auto at, auto* lanes) {
    lanes[0] = V::add(lanes[0], at.load(x));
  });
  const double mean = sum[0] / (double)row.n;
  const T center = (T)mean;
  accumulate_row<V, 1>(row.n, row.threads, square, [=](auto at, auto* lanes) {
    const auto u = at.live(V::sub(at.load(x), V::set(center)));
    lanes[0] = V::fma(u, u, lanes[0]);
  });
  return mean + row.k * std::sqrt(square[0] / (double)row.n);
}

// The largest score but row.k, an integer; NaN if there is none, or if scores are not finite. scratch has n places.
template <class V, class T> double exact_cutoff(const Row<T>& row, T* scratch) {
  if (!(row.k >= 0 && row.k < (double)row.n) || count_kinds<V>(row).finite < row.n) return std::nan("");
  const auto rank = (int64_t)row.k + 1;
  T value;
  select_ranks<V>(row.x, row.n, row.threads, rank, rank, scratch, &value, &value);
  return (double)value;
}

// y = max(x − θ, 0), or its C¹ form, u²/2δ up to u = δ; returns θ. Reads no mask. If y is null, only θ is computed.
template <class V, class T> double statistical_row(const Row<T>& row, double smooth, bool is_exact, T* y) {
  const T* x = row.x;
  const double theta = is_exact ? exact_cutoff<V>(row, y) : statistical_cutoff<V>(row);
  if (!y) return theta;
  double none[1];
  const T bound = (T)theta, delta = (T)smooth;
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
    auto u = V::max(V::sub(at.load(x), V::set(bound)), V::set(0));
    if (delta > 0) {
      const auto low = V::min(u, V::set(delta));
      u = V::div(V::mul(low, V::sub(u, V::mul(low, V::set((T)0.5)))), V::set(delta));
    }
    at.store(y, u);
  });
  return theta;
}

}  // namespace
