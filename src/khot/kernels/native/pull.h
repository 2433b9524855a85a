// The derivative of a soft top-k.
#pragma once

#include "centered.h"
#include "lanes.h"
#include "quick.h"

namespace {

// dx = v(g − ḡ)/T; returns dk = ḡ, with v = F′ as a function of y = F(z), and ḡ = Σvg/Σv.
template <class F, class V, class T, bool Careful = false> double pull_row(const Row<T>& row, const T* g, T* dx) {
  const F law = F::of(row);
  const T* y = row.x;
  double sums[2];
  accumulate_row<V, 2>(row.n, row.threads, sums, [=](auto at, auto* lanes) {
    const auto v = law.template slope<V>(at.load(y));
    lanes[0] = V::add(lanes[0], v);
    lanes[1] = V::fma(v, live<Careful, V>(v, at.load(g)), lanes[1]);
  });
  if constexpr (!Careful)
    if (!std::isfinite(sums[1])) return pull_row<F, V, T, true>(row, g, dx);
  const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
  const Centered<T, Careful> centered(mean, row.temperature);
  write_row<V>(row, dx, [=](auto at) { return centered.template of<V>(law.template slope<V>(at.load(y)), at.load(g)); });
  return mean;
}

// dx of a row of 16 bits at its root, as above but with F′ from the margins: y would have to be solved for again.
template <class F, bool Careful = false>
void half_pull(const Row<float>& row, const khot::Halves& halves, const khot::Root& root, float* room) {
  using V = Vec<float>;
  const auto [dtype, x, g, dx] = halves;
  const auto pass = [=, &row, &root](auto h) {
    using H = decltype(h);
    const F law = F::of(row);
    const Margin<float> margin({(float)root.anchor, root.shift}, row.temperature, F::is_logistic ? kLn2 : 1);
    double sums[2], none[1];
    accumulate_scores<V, 2>(row, sums, [=](auto at, auto* lanes) {
      ask_for(x + at.i), ask_for(g + at.i);
      const auto t = margin.minus_z<V>(at.allowed(row, read<H>(at, x, -std::numeric_limits<float>::infinity())));
      auto v = V::set(0);
      if constexpr (F::is_logistic) {
        const auto tail = sigma_of<V>(V::abs(t));
        v = V::fnma(tail, tail, tail);
      } else {
        v = law.template at<V>(t).density;
      }
      at.store(room, v);
      lanes[0] = V::add(lanes[0], at.live(v));
      lanes[1] = V::fma(v, live<Careful, V>(v, read<H>(at, g)), lanes[1]);
    });
    if (!Careful && !std::isfinite(sums[1])) return false;
    const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
    const auto put = [&](auto centered) {
      with_past(row.goes_past, dx, [&](auto past) {
        accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) {
          write<H, past>(at, dx, centered.template of<V>(at.load(room), read<H>(at, g)));
        });
      });
    };
    if (row.temperature == 1) put(Centered<float, Careful, true>(mean, 1));
    else put(Centered<float, Careful>(mean, row.temperature));
    return true;
  };
  const bool is_done = with_halves(dtype, pass);
  if constexpr (!Careful)
    if (!is_done) half_pull<F, true>(row, halves, root, room);
}

// The same of a row of `Count` vectors, of which the last may be a part: v and g stay in registers.
template <class F, int Count> double pull_carefully(const Row<float>& row, const float* g, float* dx);
template <class F, int Count, bool Careful = false>
[[gnu::always_inline]] inline double pull_held(const Row<float>& row, const float* g, float* dx) {
  using V = Vec<float>;
  constexpr int64_t last = (Count - 1) * kRows;
  const F law = F::of(row);
  const auto each = [&](auto body) {
    for (int i = 0; i < Count - 1; ++i) body(Full<V>{i * kRows}, i);
    if (row.n == last + kRows) body(Full<V>{last}, Count - 1);
    else body(Part<V>{last, row.n - last}, Count - 1);
  };
  Floats v[Count], h[Count], v_sum{}, w_sum{};
  each([&](auto at, int i) {
    v[i] = law.template slope<V>(at.load(row.x));
    h[i] = at.load(g);
    v_sum = V::add(v_sum, v[i]);
    w_sum = V::fma(v[i], live<Careful, V>(v[i], h[i]), w_sum);
  });
  const Pair sums = sums_of(low_half(v_sum) + high_half(v_sum), low_half(w_sum) + high_half(w_sum));
  if constexpr (!Careful)
    if (!std::isfinite(sums.second)) return pull_carefully<F, Count>(row, g, dx);
  const double mean = sums.first == 0 ? 0 : sums.second / sums.first;
  const auto write = [&](auto centered) {
    each([&](auto at, int i) { at.store(dx, centered.template of<V>(v[i], h[i])); });
  };
  if (row.temperature == 1) write(Centered<float, Careful, true>(mean, 1));
  else write(Centered<float, Careful>(mean, row.temperature));
  return mean;
}
template <class F, int Count>
[[gnu::noinline]] double pull_carefully(const Row<float>& row, const float* g, float* dx) {
  return pull_held<F, Count, true>(row, g, dx);
}

// The same of up to kRows short rows, of n ≤ kShort entries, whose sums share a vector.
template <class F, bool Careful = false>
void pull_short(const Row<float>* rows, int count, const float* const* g, float* const* dx, double* dk) {
  using V = Vec<float>;
  const int64_t n = rows->n, full = n - n % kRows;
  const auto held = [=](auto vectors) {
    for (int r = 0; r < count; ++r) dk[r] = pull_held<F, vectors>(rows[r], g[r], dx[r]);
  };
  if (n <= kRows) return held(std::integral_constant<int, 1>());
  if (n <= 2 * kRows) return held(std::integral_constant<int, 2>());
  if (n > 3 * kRows && n <= 4 * kRows) return held(std::integral_constant<int, 4>());
  const F law = F::of(*rows);
  Doubles vs[kRows] = {}, ws[kRows] = {};
  for (int r = 0; r < count; ++r) {
    const float *y = rows[r].x, *h = g[r];
    Floats v_sum{}, w_sum{};
    const auto add = [&](auto at) {
      const auto v = law.template slope<V>(at.load(y));
      v_sum = V::add(v_sum, v);
      w_sum = V::fma(v, live<Careful, V>(v, at.load(h)), w_sum);
    };
    for (int64_t i = 0; i < full; i += kRows) add(Full<V>{i});
    if (full < n) add(Part<V>{full, n - full});
    vs[r] = low_half(v_sum) + high_half(v_sum);
    ws[r] = low_half(w_sum) + high_half(w_sum);
  }
  for (int r = 0; r < kRows; r += kRows / 2) {
    const Doubles v = row_sums(vs + r), w = row_sums(ws + r);
    if constexpr (!Careful)
      if (Vec<double>::lanes(w - w == 0) != (1u << kRows / 2) - 1) return pull_short<F, true>(rows, count, g, dx, dk);
    Vec<double>::store(dk + r, Vec<double>::blend(v == 0, Doubles{}, w / v));
  }
  for (int r = 0; r < count; ++r) {
    const float *y = rows[r].x, *h = g[r];
    float* to = dx[r];
    const Centered<float, Careful> centered(dk[r], rows[r].temperature);
    const auto write = [=](auto at) {
      at.store(to, centered.template of<V>(law.template slope<V>(at.load(y)), at.load(h)));
    };
    for (int64_t i = 0; i < full; i += kRows) write(Full<V>{i});
    if (full < n) write(Part<V>{full, n - full});
  }
}

}  // namespace
