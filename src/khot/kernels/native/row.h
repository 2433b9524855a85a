// One row of scores, and passes over it.
#pragma once

#include "exps.h"
#include "kernels.h"
#include "parallel.h"

namespace {

using khot::Row;

template <class T> inline bool allowed(const Row<T>& row, int64_t i) {
  return !row.mask || row.mask[i * row.mask_stride];
}

// A vector at place i of a row, and the last one, which has only `count` lanes. Bodies of passes take either. `Masked`:
// the row has a mask.
template <class V, bool Masked = false> struct Full {
  using T = typename V::scalar;
  using reg = typename V::reg;
  int64_t i;

  reg load(const T* p, T = 0) const { return V::load(p + i); }
  void store(T* p, reg v) const { V::store(p + i, v); }
  void store_past(T* p, reg v) const { ::store_past(p + i, v); }
  reg allowed(const Row<T>& row, reg x) const {  // −inf where they may not be chosen
    if constexpr (!Masked) return x;
    return V::masked(x, row.mask + i * row.mask_stride, row.mask_stride);
  }
  reg scores(const Row<T>& row) const { return allowed(row, load(row.x)); }
  reg live(reg v) const { return v; }
  typename V::mask_t only(typename V::mask_t m) const { return m; }
  void put(T* p, reg v, unsigned) const { V::store(p, v); }  // so many lanes, or all
};
template <class V, bool Masked = false> struct Part {
  using T = typename V::scalar;
  using reg = typename V::reg;
  int64_t i, count;

  reg load(const T* p, T beyond = 0) const { return load_part(p + i, count, V::set(beyond)); }
  void store(T* p, reg v) const { store_part(p + i, v, count); }
  void store_past(T* p, reg v) const { store(p, v); }
  reg allowed(const Row<T>& row, reg x) const {
    if constexpr (!Masked) return x;
    return V::masked(x, row.mask + i * row.mask_stride, row.mask_stride, count);
  }
  reg scores(const Row<T>& row) const {  // and beyond the end
    return allowed(row, load(row.x, -std::numeric_limits<T>::infinity()));
  }
  reg live(reg v) const { return V::keep(only(~typename V::mask_t{}), v); }  // 0 beyond the end
  typename V::mask_t only(typename V::mask_t m) const { return m & (V::iota() < (Whole<T>)count); }
  void put(T* p, reg v, unsigned lanes) const { store_part(p, v, lanes); }
};

// Asks for what lies a page ahead: the processor foresees no more than the rest of one.
template <class T> inline void ask_for(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + 4096);
}
template <class T> inline void ask_for(T* to) { __builtin_prefetch(reinterpret_cast<char*>(to) + 4096, 1); }

constexpr int64_t kBlock = 32;  // lanes are flushed into float64 after so many vectors, if not said otherwise

struct Nothing {
  template <class At> void operator()(At) const {}
};

// Runs body(at, lanes) over [begin, end), a vector at a time; lanes are `Count` accumulators, 0 beyond the end, of which
// there are two sets in turns, so that no addition waits for the one before. `prepare` runs first over each block: what
// takes long to compute is better stored and read again than waited for.
template <class V, int Count, bool Masked, int64_t Block = kBlock, class Prepare, class Body>
inline void accumulate(int64_t begin, int64_t end, double* sums, Prepare prepare, Body body) {
  constexpr int64_t w = V::width;
  using At = Full<V, Masked>;
  using Last = Part<V, Masked>;
  typename V::wide wide[Count];
  for (int64_t i = begin; i < end;) {
    typename V::reg lanes[2][Count] = {};
    const int64_t stop = i + Block * w < end ? i + Block * w : end, full = stop - (stop - i) % w;
    for (int64_t j = i; j < full; j += w) prepare(At{j});
    if (full < stop) prepare(Last{full, stop - full});
    for (; i + w < full; i += 2 * w) {
      body(At{i}, lanes[0]);
      body(At{i + w}, lanes[1]);
    }
    if (i < full) body(At{i}, lanes[0]);
    if (full < stop) body(Last{full, stop - full}, lanes[1]);
    for (int s = 0; s < Count; ++s) wide[s].add(V::add(lanes[0][s], lanes[1][s]));
    i = stop;
  }
  for (int s = 0; s < Count; ++s) sums[s] = wide[s].total();
}

// The same over a whole row, in chunks whose sums are added in order: the same bits at any number of threads.
template <class V, int Count, bool Masked = false, int64_t Block = kBlock, class Body, class Prepare = Nothing>
inline void accumulate_row(int64_t n, int threads, double* sums, Body body, Prepare prepare = {}) {
  for (int s = 0; s < Count; ++s) sums[s] = 0;
  for_chunks<Count>(n, threads, sums, [&](int64_t begin, int64_t end, double* part) {
    accumulate<V, Count, Masked, Block>(begin, end, part, prepare, body);
  });
}

// The same where the body asks for the scores of the row.
template <class V, int Count, class T, class Body, class Prepare = Nothing>
inline void accumulate_scores(const Row<T>& row, double* sums, Body body, Prepare prepare = {}) {
  if (row.mask) return accumulate_row<V, Count, true>(row.n, row.threads, sums, body, prepare);
  accumulate_row<V, Count, false>(row.n, row.threads, sums, body, prepare);
}

// Writes at.store(to, make(at)) for a whole row; past the cache if the row is to be, and can.
template <class V, class T, class Make> inline void write_row(const Row<T>& row, T* to, Make make) {
  double none[1];
  if (!row.goes_past || reinterpret_cast<uintptr_t>(to) % kBytes)
    return accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) { at.store(to, make(at)); });
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto at, auto*) { at.store_past(to, make(at)); });
  flush_stores();
}

// Packs into `out` the scores that body(at, &x) says to keep; returns how many. `out` may be what the body reads.
template <class V, bool Masked = false, class T, class Body> inline int64_t pack_row(int64_t n, T* out, Body body) {
  int64_t i = 0, kept = 0;
  const auto step = [&](auto at) {
    typename V::reg x;
    const unsigned set = V::lanes(at.only(body(at, &x)));
    const int count = __builtin_popcount(set);
    at.put(out + kept, packed(x, set), (unsigned)count);
    kept += count;
  };
  for (; i + V::width <= n; i += V::width) step(Full<V, Masked>{i});
  if (i < n) step(Part<V, Masked>{i, n - i});
  return kept;
}
template <class V, class T, class Body> inline int64_t pack_scores(const Row<T>& row, T* out, Body body) {
  return row.mask ? pack_row<V, true>(row.n, out, body) : pack_row<V, false>(row.n, out, body);
}

struct Census {
  int64_t finite, infinite, nan;  // allowed scores that are finite, +inf, NaN
};

template <class V, class T> Census count_kinds(const Row<T>& row) {
  double counts[3];
  accumulate_scores<V, 3>(row, counts, [=](auto at, auto* lanes) {
    const auto x = at.scores(row), one = V::set(1), largest = V::set(Limits<T>::largest);
    lanes[0] = V::add(lanes[0], V::keep(V::ge(largest, V::abs(x)), one));
    lanes[1] = V::add(lanes[1], V::keep(V::gt(x, largest), one));
    lanes[2] = V::add(lanes[2], V::blend(V::ge(x, x), V::set(0), one));
  });
  return {(int64_t)counts[0], (int64_t)counts[1], (int64_t)counts[2]};
}

// Packs the allowed scores above −inf, and below +inf if `finite`.
template <class V, class T> void gather(const Row<T>& row, bool finite, T* out) {
  const T high = finite ? Limits<T>::largest : std::numeric_limits<T>::infinity();
  pack_scores<V>(row, out, [=](auto at, auto* x) {
    *x = at.scores(row);
    return V::both(V::ge(V::set(high), *x), V::ge(*x, V::set(-Limits<T>::largest)));
  });
}

}  // namespace
