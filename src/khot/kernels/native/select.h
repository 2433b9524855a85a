// Order statistics and hard selection.
#pragma once

#include "row.h"

namespace khot {

// The values of rank r and s (1 = greatest, r ≤ s ≤ r + 1) among values[0..m), which is reordered. No NaN. Compiled once for every
// machine: the standard algorithms must not be instantiated with wider instructions.
void nth(float* values, int64_t m, int64_t r, int64_t s, float* value_r, float* value_s);
void nth(double* values, int64_t m, int64_t r, int64_t s, double* value_r, double* value_s);

}  // namespace khot

namespace {

constexpr int64_t kMostSampled = 4096, kLeastSampled = 128;

// As khot::nth for long rows, between two order statistics of a sample; `scratch` has m places and may be `values` itself.
template <class V, class T>
void select_ranks(const T* values, int64_t m, int threads, int64_t r, int64_t s, T* scratch, T* value_r, T* value_s) {
  const int64_t size = m / 8 < kMostSampled ? m / 8 : kMostSampled;
  if (size >= kLeastSampled) {
    T sample[kMostSampled], high = std::numeric_limits<T>::infinity(), low = -high;  // 32 KB at most
    for (int64_t i = 0; i < size; ++i) sample[i] = values[i * (m / size)];
    const auto at = (int64_t)((double)r / (double)m * (double)size);
    const auto margin = (int64_t)(2 * std::sqrt((double)size));  // four standard deviations of a binomial count, or more
    if (at > margin) khot::nth(sample, size, at - margin, at - margin, &high, &high);
    if (at + margin <= size) khot::nth(sample, size, at + margin, at + margin, &low, &low);
    double counts[2];
    accumulate_row<V, 2>(m, threads, counts, [=](auto tag, int64_t i, auto* lanes) {
      using W = decltype(tag);
      const auto x = W::load(values + i);
      lanes[0] = W::add(lanes[0], W::keep(W::gt(x, W::set(high)), W::set(1)));
      lanes[1] = W::add(lanes[1], W::keep(W::ge(x, W::set(low)), W::set(1)));
    });
    const auto above = (int64_t)counts[0], reached = (int64_t)counts[1];
    if (above < r && s <= reached) {
      *value_r = *value_s = high;
      if (high == low) return;
      const int64_t between = pack_row<V>(m, scratch, [=](auto tag, int64_t i, auto* x) {
        using W = decltype(tag);
        *x = W::load(values + i);
        return W::both(W::ge(W::set(high), *x), W::ge(*x, W::set(low)));
      });
      return khot::nth(scratch, between, r - above, s - above, value_r, value_s);
    }
  }
  if (scratch != values) std::memcpy(scratch, values, (size_t)m * sizeof(T));
  khot::nth(scratch, m, r, s, value_r, value_s);
}

// Ones at the k greatest allowed scores, ties by lowest index; NaN throughout if that cannot be done.
template <class V, class T> void hard_row(const Row<T>& row, T* out) {
  const Census census = count_kinds<V>(row);
  const int64_t possible = census.finite + census.infinite;
  if (census.nan || !(row.k >= 0 && row.k == std::floor(row.k) && row.k <= (double)possible)) {
    for (int64_t i = 0; i < row.n; ++i) out[i] = std::numeric_limits<T>::quiet_NaN();
    return;
  }
  const auto k = (int64_t)row.k;
  T bound = std::numeric_limits<T>::infinity();  // the smallest chosen score
  int64_t ties = 0;
  if (k > 0) {
    const bool is_whole = !row.mask && possible == row.n;
    if (!is_whole) gather<V>(row, false, out);
    select_ranks<V>(is_whole ? row.x : out, possible, row.threads, k, k, out, &bound, &bound);
  }
  double above[1];
  accumulate_row<V, 1>(row.n, row.threads, above, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto one = W::keep(W::gt(load<W>(row, i), W::set(bound)), W::set(1));
    W::store(out + i, one);
    lanes[0] = W::add(lanes[0], one);
  });
  ties = k - (int64_t)above[0];
  for (int64_t i = 0; ties > 0; ++i) {
    if (!allowed(row, i) || row.x[i] != bound) continue;
    out[i] = 1;
    --ties;
  }
}

}  // namespace
