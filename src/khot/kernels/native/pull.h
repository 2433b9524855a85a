// The derivative of a soft top-k.
#pragma once

#include "cdfs.h"
#include "row.h"

namespace {

// dx = v(g − ḡ)/T; returns dk = ḡ, with v = F′ as a function of y = F(z), and ḡ = Σvg/Σv.
template <class F, class V, class T> double pull_row(const Row<T>& row, const T* g, T* dx) {
  const T* y = row.x;
  double sums[2];
  accumulate_row<V, 2>(row.n, row.threads, sums, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto v = F::template slope<W>(W::load(y + i));
    lanes[0] = W::add(lanes[0], v);
    lanes[1] = W::fma(v, W::load(g + i), lanes[1]);
  });
  const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
  double none[1];
  const T center = (T)mean, scale = (T)(1.0 / row.temperature);
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto tag, int64_t i, auto*) {
    using W = decltype(tag);
    const auto v = F::template slope<W>(W::load(y + i));
    W::store(dx + i, W::mul(W::mul(v, W::set(scale)), W::sub(W::load(g + i), W::set(center))));
  });
  return mean;
}

}  // namespace
