// Order statistics.
#pragma once

#include "row.h"

namespace khot {

// The values of rank r and s (1 = greatest, r ≤ s ≤ r + 1) among values[0..m), which is reordered. No NaN. Compiled
// once for every machine: the standard algorithms must not be instantiated with wider instructions.
void nth(float* values, int64_t m, int64_t r, int64_t s, float* value_r, float* value_s);
void nth(double* values, int64_t m, int64_t r, int64_t s, double* value_r, double* value_s);

}  // namespace khot

namespace {

constexpr int64_t kMostSampled = 4096;
constexpr int64_t kMostCounted = 1 << 24;  // so far floats count

// An integer whose order is that of the scores, and back; −0 has the key of 0.
template <class T> inline Whole<T> order_key(T x) {
  if (x == 0) return 0;
  Whole<T> key;
  std::memcpy(&key, &x, sizeof key);
  return key < 0 ? key ^ std::numeric_limits<Whole<T>>::max() : key;
}
template <class T> inline T score_of(Whole<T> key) {
  if (key < 0) key ^= std::numeric_limits<Whole<T>>::max();
  T x;
  std::memcpy(&x, &key, sizeof x);
  return x;
}

// How many scores reach a pivot, the smallest of them, and the largest of the others.
template <class T> struct Parted {
  int64_t count;
  T from, below;
};

template <class V, class T> Parted<T> part_at(const T* values, int64_t m, T pivot) {
  const T inf = std::numeric_limits<T>::infinity();
  auto count = V::set(0), from = V::set(inf), below = V::set(-inf);
  const auto step = [&](auto at) {
    const auto x = at.load(values);
    const auto reaches = at.only(V::ge(x, V::set(pivot))), others = at.only(V::gt(V::set(pivot), x));
    count = V::add(count, V::keep(reaches, V::set(1)));
    from = V::min(from, V::blend(reaches, x, from));
    below = V::max(below, V::blend(others, x, below));
  };
  int64_t i = 0;
  for (; i + V::width <= m; i += V::width) step(Full<V>{i});
  if (i < m) step(Part<V>{i, m - i});
  return {(int64_t)V::total(count), V::least(from), V::most(below)};
}

// The smallest score and the largest.
template <class T> struct Ends {
  T low, high;
};

template <class V, class T> Ends<T> ends_of(const T* values, int64_t m) {
  const T inf = std::numeric_limits<T>::infinity();
  auto low = V::set(inf), high = V::set(-inf);
  const auto step = [&](auto at) {
    low = V::min(low, at.load(values, inf));
    high = V::max(high, at.load(values, -inf));
  };
  int64_t i = 0;
  for (; i + V::width <= m; i += V::width) step(Full<V>{i});
  if (i < m) step(Part<V>{i, m - i});
  return {V::least(low), V::most(high)};
}

constexpr int64_t kMostParted = 16384;  // bytes

template <class T> inline bool is_few(int64_t m) { return m <= kMostParted / (int64_t)sizeof(T); }

// As khot::nth, between two scores that occur: two times where the rank lies if the scores between are spread evenly, then
// half way between their keys. So it takes a few vector passes, and never more than 96 (192 for doubles).
template <class V, class T> void select_between(const T* values, int64_t m, int64_t r, int64_t s, Ends<T> ends,
                                                T* value_r, T* value_s) {
  T low = ends.low, high = ends.high;  // the score of rank r is one of [low, high]
  T below = low;                       // the next smaller score than `low`
  int64_t reached = m, above = 0;      // how many reach `low`, and how many are larger than `high`
  for (int i = 0; low != high && reached != r; ++i) {
    const T share = ((T)(r - above) - T(0.5)) / (T)(reached - above);
    T pivot = high + share * (low - high);
    if (i % 3 == 2 || !(pivot > low && pivot <= high)) {
      const auto low_key = order_key(low), high_key = order_key(high);
      using Unsigned = Bits<T>;
      const auto half = (Whole<T>)(((Unsigned)high_key - (Unsigned)low_key) >> 1);
      pivot = score_of<T>(low_key + half + 1);
      if (!(pivot > low)) pivot = std::numeric_limits<T>::min();  // a machine that takes the pivot for 0, and low is 0
    }
    const Parted<T> at = part_at<V>(values, m, pivot);
    if (at.count >= r) {
      low = at.from, below = at.below, reached = at.count;
    } else {
      high = at.below, above = at.count;
    }
  }
  *value_r = low + T(0);  // not −0, which other lanes may have met first
  *value_s = (s > reached ? below : low) + T(0);
}

// As khot::nth, which serves a row better that is so long that it leaves the cache.
template <class V, class T> void select_few(T* values, int64_t m, int64_t r, int64_t s, T* value_r, T* value_s) {
  if (!is_few<T>(m)) return khot::nth(values, m, r, s, value_r, value_s);
  select_between<V>(values, m, r, s, ends_of<V>(values, m), value_r, value_s);
}

// As khot::nth, where high ≥ value_r and value_s ≥ low, and the scores between are many: they are ties of high and low,
// or nearly all of them are, and need not be sorted.
template <class V, class T> void select_among_ties(const T* values, int64_t m, int threads, int64_t r, int64_t s,
                                                   T high, T low, T* scratch, T* value_r, T* value_s) {
  double counts[2];
  accumulate_row<V, 2>(m, threads, counts, [=](auto at, auto* lanes) {
    const auto x = at.load(values);
    lanes[0] = V::add(lanes[0], V::keep(at.only(V::ge(x, V::set(high))), V::set(1)));
    lanes[1] = V::add(lanes[1], V::keep(at.only(V::gt(x, V::set(low))), V::set(1)));
  });
  const auto to_high = (int64_t)counts[0],
             to_low = (int64_t)counts[1];  // the last rank of high, and the one before low
  *value_r = r <= to_high ? high : low;
  *value_s = s <= to_high ? high : low;
  const int64_t first = r > to_high ? r : s, last = s <= to_low ? s : r;  // those that are neither
  if (first > to_low || last <= to_high) return;
  const int64_t between = pack_row<V>(m, scratch, [=](auto at, auto* x) {
    *x = at.load(values);
    return V::both(V::gt(V::set(high), *x), V::gt(*x, V::set(low)));
  });
  T upper, lower;
  select_few<V>(scratch, between, first - to_high, last - to_high, &upper, &lower);
  if (first == r) *value_r = upper;
  if (last == s) *value_s = lower;
}

// As khot::nth for long rows, between two order statistics of a sample, again and again until few are left; `scratch`
// has m places and may be `values` itself.
template <class V, class T>
void select_ranks(const T* values, int64_t m, int threads, int64_t r, int64_t s, T* scratch, T* value_r, T* value_s) {
  while (!is_few<T>(m)) {
    const int64_t size = m / 8 < kMostSampled ? m / 8 : kMostSampled;
    T sample[kMostSampled], high = std::numeric_limits<T>::infinity(), low = -high;  // 32 KB at most
    for (int64_t i = 0; i < size; ++i) sample[i] = values[i * (m / size)];
    const auto at = (int64_t)((double)r / (double)m * (double)size);
    const auto margin =
        (int64_t)(2 * std::sqrt((double)size));  // four standard deviations of a binomial count, or more
    if (at > margin) select_few<V>(sample, size, at - margin, at - margin, &high, &high);
    if (at + margin <= size) select_few<V>(sample, size, at + margin, at + margin, &low, &low);
    // One thread packs and counts in one pass; values are not packed where they lie before their number is known.
    int64_t above, between;
    const auto pack = [=](auto* larger) {
      return pack_row<V>(m, scratch, [=](auto at, auto* x) {
        *x = at.load(values);
        if (larger) *larger = V::add(*larger, V::keep(at.only(V::gt(*x, V::set(high))), V::set(1)));
        return V::both(V::ge(V::set(high), *x), V::ge(*x, V::set(low)));
      });
    };
    const bool packs_at_once = threads == 1 && values != scratch && m <= kMostCounted;
    if (packs_at_once) {
      auto larger = V::set(0);
      between = pack(&larger);
      above = (int64_t)V::total(larger);
    } else {
      double counts[2];
      accumulate_row<V, 2>(m, threads, counts, [=](auto at, auto* lanes) {
        const auto x = at.load(values);
        lanes[0] = V::add(lanes[0], V::keep(at.only(V::gt(x, V::set(high))), V::set(1)));
        lanes[1] = V::add(lanes[1], V::keep(at.only(V::ge(x, V::set(low))), V::set(1)));
      });
      above = (int64_t)counts[0], between = (int64_t)counts[1] - above;
    }
    if (above >= r || s > above + between) break;
    *value_r = *value_s = high;
    if (high == low) return;
    if (between > m / 4)
      return select_among_ties<V>(values, m, threads, r, s, high, low, scratch, value_r, value_s);
    m = packs_at_once ? between : pack((typename V::reg*)nullptr);
    values = scratch, r -= above, s -= above;
  }
  if (is_few<T>(m)) return select_between<V>(values, m, r, s, ends_of<V>(values, m), value_r, value_s);
  if (scratch != values) std::memcpy(scratch, values, (size_t)m * sizeof(T));
  khot::nth(scratch, m, r, s, value_r, value_s);
}

}  // namespace
