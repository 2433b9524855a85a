// Statistical top-k: what exceeds a threshold that the mean and the deviation of a row give.
#pragma once

#include "row.h"

namespace {

// y = max(x − θ, 0) with θ = mean + std·row.k, or its C¹ form, u²/2δ up to u = δ; returns θ. Reads no mask. If y is
// null, only θ is computed.
template <class V, class T> double statistical_row(const Row<T>& row, double smooth, T* y) {
  const T* x = row.x;
  double sum[1], square[1], none[1];
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
  const double theta = mean + row.k * std::sqrt(square[0] / (double)row.n);
  if (!y) return theta;
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
