// One row of scores, and passes over it.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

using khot::Row;

template <class T> inline bool allowed(const Row<T>& row, int64_t i) {
  return !row.mask || row.mask[i * row.mask_stride];
}

template <class V, class T> inline typename V::reg load(const Row<T>& row, int64_t i) {
  if (!row.mask) return V::load(row.x + i);
  return V::load_masked(row.x + i, row.mask + i * row.mask_stride, row.mask_stride);
}

constexpr int64_t kBlock = 16;  // lanes are flushed into float64 after so many vectors

// Runs body<V>(i, lanes) over [begin, end), vectors first and single lanes after; lanes are `Count` accumulators.
template <class V, int Count, class Body> inline void accumulate(int64_t begin, int64_t end, double* sums, Body body) {
  using S = Scalar<typename V::scalar>;
  typename V::wide wide[Count];
  double rest[Count] = {};
  int64_t i = begin;
  while (i + V::width <= end) {
    typename V::reg lanes[Count];
    for (int s = 0; s < Count; ++s) lanes[s] = V::set(0);
    const int64_t stop = i + kBlock * V::width < end ? i + kBlock * V::width : end;
    for (; i + V::width <= stop; i += V::width) body(V(), i, lanes);
    for (int s = 0; s < Count; ++s) wide[s].add(lanes[s]);
  }
  for (; i < end; ++i) {
    typename S::reg lanes[Count] = {};
    body(S(), i, lanes);
    for (int s = 0; s < Count; ++s) rest[s] += (double)lanes[s];
  }
  for (int s = 0; s < Count; ++s) sums[s] = wide[s].total() + rest[s];
}

// The same over a whole row, in chunks whose sums are added in order: the same bits at any number of threads.
template <class V, int Count, class Body> inline void accumulate_row(int64_t n, int threads, double* sums, Body body) {
  for (int s = 0; s < Count; ++s) sums[s] = 0;
  for_chunks<Count>(n, threads, sums,
                    [&](int64_t begin, int64_t end, double* part) { accumulate<V, Count>(begin, end, part, body); });
}

// Packs into `out` the scores that body<V>(i, &x) says to keep; returns how many. `out` may be what the body reads.
template <class V, class T, class Body> inline int64_t pack_row(int64_t n, T* out, Body body) {
  using S = Scalar<T>;
  int64_t i = 0, kept = 0;
  for (; i + V::width <= n; i += V::width) {
    typename V::reg x;
    const auto keep = body(V(), i, &x);
    kept += V::pack(out + kept, keep, x);
  }
  for (; i < n; ++i) {
    T x;
    const bool keep = body(S(), i, &x);
    kept += S::pack(out + kept, keep, x);
  }
  return kept;
}

struct Census {
  int64_t finite, infinite, nan;  // allowed scores that are finite, +inf, NaN
};

template <class V, class T> Census count_kinds(const Row<T>& row) {
  double counts[3];
  accumulate_row<V, 3>(row.n, row.threads, counts, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto x = load<W>(row, i), one = W::set(1), largest = W::set(Limits<T>::largest);
    lanes[0] = W::add(lanes[0], W::keep(W::ge(largest, W::abs(x)), one));
    lanes[1] = W::add(lanes[1], W::keep(W::gt(x, largest), one));
    lanes[2] = W::add(lanes[2], W::keep(W::ge(x, x), one));
  });
  return {(int64_t)counts[0], (int64_t)counts[1], row.n - (int64_t)counts[2]};
}

// Packs the allowed scores above −inf, and below +inf if `finite`.
template <class V, class T> void gather(const Row<T>& row, bool finite, T* out) {
  const T high = finite ? Limits<T>::largest : std::numeric_limits<T>::infinity();
  pack_row<V>(row.n, out, [=](auto tag, int64_t i, auto* x) {
    using W = decltype(tag);
    *x = load<W>(row, i);
    return W::both(W::ge(W::set(high), *x), W::ge(*x, W::set(-Limits<T>::largest)));
  });
}

}  // namespace
