// Hard selection: ones at the k largest allowed scores of a row, ties by lowest index; NaN throughout if that cannot be
// done. Only scores are compared, so every width and every way gives the same bits.
#pragma once

#include "select.h"

namespace {

// How many allowed scores of a row that is not long, how many NaN, and the ends of those that are above −∞.
template <class T> struct Survey {
  int64_t possible, nan;
  Ends<T> ends;
};

template <class V, class T, bool Masked> Survey<T> survey(const Row<T>& row) {
  const T inf = std::numeric_limits<T>::infinity();
  const auto zero = V::set(0), one = V::set(1), lowest = V::set(-inf), highest = V::set(inf);
  auto possible = zero, nan = zero, low = highest, high = lowest;
  const auto step = [&](auto at) {
    const auto x = at.scores(row);
    const auto is_possible = V::gt(x, lowest);
    possible = V::add(possible, V::keep(is_possible, one));
    nan = V::add(nan, V::blend(V::ge(x, x), zero, one));
    low = V::min(low, V::blend(is_possible, x, highest));
    high = V::max(high, V::blend(is_possible, x, lowest));
  };
  int64_t i = 0;
  for (; i + V::width <= row.n; i += V::width) step(Full<V, Masked>{i});
  if (i < row.n) step(Part<V, Masked>{i, row.n - i});
  return {(int64_t)V::total(possible), (int64_t)V::total(nan), {V::least(low), V::most(high)}};
}

template <class V, class T> Survey<T> survey(const Row<T>& row) {
  if (is_few<T>(row.n)) return row.mask ? survey<V, T, true>(row) : survey<V, T, false>(row);
  const Census census = count_kinds<V>(row);
  return {census.finite + census.infinite, census.nan, {}};
}

template <class V, class T> void hard_row(const Row<T>& row, T* out) {
  const Survey<T> all = survey<V>(row);
  if (all.nan || !(row.k >= 0 && row.k == std::floor(row.k) && row.k <= (double)all.possible)) {
    for (int64_t i = 0; i < row.n; ++i) out[i] = std::numeric_limits<T>::quiet_NaN();
    return;
  }
  const auto k = (int64_t)row.k;
  if (k == 0) {
    std::memset(out, 0, (size_t)row.n * sizeof(T));
    return;
  }
  T bound = all.ends.high;  // the smallest chosen score
  if (!is_few<T>(row.n) || k > 1) {
    const bool is_whole = !row.mask && all.possible == row.n;
    if (!is_whole) gather<V>(row, false, out);
    const T* values = is_whole ? row.x : out;
    if (is_few<T>(row.n))
      select_between<V>(values, all.possible, k, k, all.ends, &bound, &bound);
    else
      select_ranks<V>(values, all.possible, row.threads, k, k, out, &bound, &bound);
  }
  double reached[1];
  accumulate_scores<V, 1>(row, reached, [=](auto at, auto* lanes) {
    const auto one = V::keep(V::ge(at.scores(row), V::set(bound)), V::set(1));
    at.store(out, one);
    lanes[0] = V::add(lanes[0], at.live(one));
  });
  auto beyond = (int64_t)reached[0] - k;  // ties of the smallest
  for (int64_t i = row.n - 1; beyond > 0; --i) {
    if (!allowed(row, i) || row.x[i] != bound) continue;
    out[i] = 0;
    --beyond;
  }
}

// Short rows of one length side by side, a lane each. A score is chosen if fewer than k come before it, which is counted
// over all pairs: no branch depends on the scores.
template <class V, class T> void hard_short(const khot_rows& rows, int64_t first, int64_t count, T* out) {
  constexpr int64_t w = V::width;
  using reg = typename V::reg;
  const int64_t n = rows.n;
  const T inf = std::numeric_limits<T>::infinity();
  const auto wanted_of = [&](double k) {  // −1: no row of n scores has so many
    return k >= 0 && k <= (double)n && k == (double)(int64_t)k ? (T)k : -1;
  };
  const T of_all = rows.k ? 0 : wanted_of(rows.k_of_all);
  for (int64_t begin = first; begin < first + count; begin += w) {
    const int64_t here = first + count - begin < w ? first + count - begin : w;
    const T* from = static_cast<const T*>(rows.x) + begin * n;
    T columns[khot::kTiny * w];
    reg wanted = V::set(of_all);
    for (int64_t r = 0; rows.k && r < here; ++r) wanted[r] = wanted_of(rows.k[(begin + r) * rows.k_stride]);
    for (int64_t j = 0; j < n; ++j) {
      if (here == w)
        for (int64_t r = 0; r < w; ++r) columns[j * w + r] = from[r * n + j];
      else
        for (int64_t r = 0; r < w; ++r) columns[j * w + r] = r < here ? from[r * n + j] : 0;
    }
    if (rows.mask) {
      const uint8_t* mask = rows.mask + begin * rows.mask_row_stride;
      for (int64_t r = 0; r < here; ++r)
        for (int64_t j = 0; j < n; ++j)
          if (!mask[r * rows.mask_row_stride + j * rows.mask_stride]) columns[j * w + r] = -inf;
    }
    const auto one = V::set(1);
    reg before[khot::kTiny], possible{};
    auto is_number = V::ge(one, one);
    for (int64_t j = 0; j < n; ++j) {
      const auto x = V::load(columns + j * w);
      reg mine = V::set((T)j);  // all to the left, less those that are smaller
      for (int64_t i = 0; i < j; ++i) {
        const auto is_larger = V::keep(V::gt(x, V::load(columns + i * w)), one);
        mine = V::sub(mine, is_larger);
        before[i] = V::add(before[i], is_larger);
      }
      before[j] = mine;
      possible = V::add(possible, V::keep(V::gt(x, V::set(-inf)), one));
      is_number = V::both(is_number, V::ge(x, x));
    }
    const auto can_be = V::both(is_number, V::both(V::ge(wanted, V::set(0)), V::ge(possible, wanted)));
    const auto none = V::blend(can_be, V::set(0), V::set(std::numeric_limits<T>::quiet_NaN()));
    for (int64_t j = 0; j < n; ++j)
      V::store(columns + j * w, V::blend(V::both(can_be, V::gt(wanted, before[j])), one, none));
    T* to = out + begin * n;
    if (here == w) {
      for (int64_t r = 0; r < w; ++r)
        for (int64_t j = 0; j < n; ++j) to[r * n + j] = columns[j * w + r];
    } else {
      for (int64_t r = 0; r < here; ++r)
        for (int64_t j = 0; j < n; ++j) to[r * n + j] = columns[j * w + r];
    }
  }
}

}  // namespace
