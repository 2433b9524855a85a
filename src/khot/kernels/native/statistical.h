// Statistical top-k: what exceeds a threshold that the mean and the deviation of a row give.
#pragma once

#include "select.h"

namespace {

// mean + std·row.k
template <class V, class T> double statistical_cutoff(const Row<T>& row) {
  const T* x = row.x;
  double sum[1], square[1];
  accumulate_row<V, 1>(row.n, row.threads, sum, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    lanes[0] = W::add(lanes[0], W::load(x + i));
  });
  const double mean = sum[0] / (double)row.n;
  const T center = (T)mean;
  accumulate_row<V, 1>(row.n, row.threads, square, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto u = W::sub(W::load(x + i), W::set(center));
    lanes[0] = W::fma(u, u, lanes[0]);
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
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto tag, int64_t i, auto*) {
    using W = decltype(tag);
    auto u = W::max(W::sub(W::load(x + i), W::set(bound)), W::set(0));
    if (delta > 0) {
      const auto low = W::min(u, W::set(delta));
      u = W::div(W::mul(low, W::sub(u, W::mul(low, W::set((T)0.5)))), W::set(delta));
    }
    W::store(y + i, u);
  });
  return theta;
}

}  // namespace
