// The derivative of a soft top-k.
#pragma once

#include "cdfs.h"
#include "lanes.h"

namespace {

// dx = v(g − ḡ)/T; returns dk = ḡ, with v = F′ as a function of y = F(z), and ḡ = Σvg/Σv.
template <class F, class V, class T> double pull_row(const Row<T>& row, const T* g, T* dx) {
  const F law = F::of(row);
  const T* y = row.x;
  double sums[2];
  accumulate_row<V, 2>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
    const auto v = law.template slope<V>(at.load(y));
    lanes[0] = V::add(lanes[0], v);
    lanes[1] = V::fma(v, at.load(g), lanes[1]);
  });
  const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
  double none[1];
  const T center = (T)mean, scale = (T)(1.0 / row.temperature);
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
    const auto v = law.template slope<V>(at.load(y));
    at.store(dx, V::mul(V::mul(v, V::set(scale)), V::sub(at.load(g), V::set(center))));
  });
  return mean;
}

// The same of up to kRows short rows, of n ≤ kShort entries, whose sums share a vector.
template <class F> void pull_short(const Row<float>* rows, int count, const float* const* g, float* const* dx,
                                   double* dk) {
  using V = Vec<float>;
  const int64_t n = rows->n, full = n - n % kRows;
  const F law = F::of(*rows);
  Doubles vs[kRows] = {}, ws[kRows] = {};
  for (int r = 0; r < count; ++r) {
    const float *y = rows[r].x, *h = g[r];
    Floats v_sum{}, w_sum{};
    const auto add = [&](auto at) {
      const auto v = law.template slope<V>(at.load(y));
      v_sum = V::add(v_sum, v);
      w_sum = V::fma(v, at.load(h), w_sum);
    };
    for (int64_t i = 0; i < full; i += kRows) add(Full<V>{i});
    if (full < n) add(Part<V>{full, n - full});
    vs[r] = low_half(v_sum) + high_half(v_sum);
    ws[r] = low_half(w_sum) + high_half(w_sum);
  }
  for (int r = 0; r < kRows; r += kRows / 2) {
    const Doubles v = row_sums(vs + r), w = row_sums(ws + r);
    Vec<double>::store(dk + r, Vec<double>::blend(v == 0, Doubles{}, w / v));
  }
  for (int r = 0; r < count; ++r) {
    const float *y = rows[r].x, *h = g[r];
    float* to = dx[r];
    const auto center = V::set((float)dk[r]), scale = V::set((float)(1.0 / rows[r].temperature));
    const auto write = [=](auto at) {
      const auto slope = law.template slope<V>(at.load(y));
      at.store(to, V::mul(V::mul(slope, scale), V::sub(at.load(h), center)));
    };
    for (int64_t i = 0; i < full; i += kRows) write(Full<V>{i});
    if (full < n) write(Part<V>{full, n - full});
  }
}

}  // namespace
