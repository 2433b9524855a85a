// A part of a row at a threshold that is given, not solved for: the sums of both sides of F there, and the values.
#pragma once

#include "cdfs.h"
#include "row.h"

namespace {

using khot::Threshold;

template <class V, class T> typename V::reg minus_z_at(typename V::reg x, const Row<T>& row, const Threshold<T>& tau) {
  return V::add(V::div(V::sub(V::set(tau.anchor), x), V::set((T)row.temperature)), V::set(tau.shift));
}

// The number of scores above the median of F, Σ F below it, Σ 1 − F above it, Σ F′ below and above it. Reads no mask.
template <class Cdf, class V, class T> void sums_at(const Row<T>& row, const Threshold<T>& tau, double* sums) {
  const Cdf law = Cdf::of(row);
  const T* x = row.x;
  accumulate_row<V, 5>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
    const auto f = law.template at<V>(minus_z_at<V>(at.load(x), row, tau));
    const auto above = at.only(f.above);  // an infinite anchor has no score that counts for nothing
    const auto tail = V::keep(above, f.tail), density = V::keep(above, f.density);
    lanes[0] = V::add(lanes[0], V::keep(above, V::set(1)));
    lanes[1] = V::add(lanes[1], V::sub(at.live(f.tail), tail));
    lanes[2] = V::add(lanes[2], tail);
    lanes[3] = V::add(lanes[3], V::sub(at.live(f.density), density));
    lanes[4] = V::add(lanes[4], density);
  });
}

// y = F(z) + give·F′(z), within [0, 1]. An infinite threshold puts all scores on one side, but for infinite ones.
template <class Cdf, class V, class T> void value_at(const Row<T>& row, const Threshold<T>& tau, T give, T* y) {
  constexpr T inf = std::numeric_limits<T>::infinity();
  const Cdf law = Cdf::of(row);
  const T* x = row.x;
  if (!(tau.shift > -inf && tau.shift < inf)) {
    const T other = tau.shift > 0 ? 0 : tau.shift < 0 ? 1 : tau.shift;
    for (int64_t i = 0; i < row.n; ++i) y[i] = x[i] == inf && other == 0 ? 1 : x[i] == -inf && other == 1 ? 0 : other;
    return;
  }
  double none[1];
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
    const auto minus_z = minus_z_at<V>(at.load(x), row, tau);
    const auto f = law.template at<V>(minus_z);
    const auto value = V::fma(V::set(give), f.density, V::blend(f.above, V::sub(V::set(1), f.tail), f.tail));
    const auto within = V::min(V::max(value, V::set(0)), V::set(1));
    at.store(y, V::blend(V::ge(minus_z, minus_z), within, minus_z));  // NaN for NaN
  });
}

}  // namespace
