// The quick way of quick.h for many rows at once: short ones as columns, and longer ones whose steps alone share a vector.
// Rows that it does not settle are left to another way.
#pragma once

#include "lanes.h"
#include "quick.h"

namespace {

constexpr unsigned kAll = (1u << kRows) - 1;
constexpr int64_t kNarrow = 2 * kRows;  // longer rows are not worth a transposition

struct LaneMoments {
  Floats p, v, pv, vv;  // as in Moments
};

// p(1 − p). A product of small numbers that is rounded by itself may be below the normal range, which takes many times as
// long: p·p would be, and what has underflowed, too.
inline Floats spread(Floats p) {
  using V = Vec<float>;
  return kFuses ? V::fnma(p, p, p) : V::mul(p, V::sub(V::set(1), p));
}

// Adds an entry. There, one below 1e-18 counts as that in all but Σp: these sums only say where to step.
inline void add_entry(Floats p, LaneMoments& m) {
  using V = Vec<float>;
  const auto q = kFuses ? p : V::max(p, V::set(1e-18f)), v = spread(q);
  m = {V::add(m.p, p), V::add(m.v, v), V::fma(q, v, m.pv), V::fma(v, v, m.vv)};
}

// The first score of each row; 0 if it is not finite, or may not be chosen.
inline Floats first_scores(const Row<float>* rows) {
  using V = Vec<float>;
  float first[kRows];
  for (int r = 0; r < kRows; ++r) first[r] = rows[r].x[0];
  for (int r = 0; rows->mask && r < kRows; ++r) first[r] = allowed(rows[r], 0) ? first[r] : 0;
  const auto x = V::load(first);
  return V::keep(V::ge(V::set(Limits<float>::largest), V::abs(x)), x);
}

// Short rows as columns, and p likewise.
struct ShortRows {
  using V = Vec<float>;
  Floats origin, number{}, drifts{}, squares{};
  Columns rows;
  Floats p[kNarrow];

  explicit ShortRows(const Row<float>* given)
      : origin(first_scores(given)),
        rows(given, [this](const Floats* block, int64_t count) { describe(block, count, false); }) {
    if (V::lanes(V::ge(V::set(Limits<float>::largest), squares)) == kAll) return;
    number = drifts = squares = Floats{};
    describe(rows.x, rows.n, true);
  }
  const Group& group() const { return rows; }
  Floats drift() const { return V::div(drifts, number); }
  Floats mean() const { return V::add(origin, drift()); }
  Floats variance() const {
    return V::max(V::fnma(drift(), drift(), V::div(squares, number)), V::set(0));
  }
  LaneMoments evaluate(Floats anchor, Floats scale, Floats shift) {
    const int64_t n = rows.n;
    for (int64_t j = 0; j < n; ++j) p[j] = sigma_of<V>(V::fma(V::sub(anchor, rows.x[j]), scale, shift));
    LaneMoments sums[2] = {};
    for (int64_t j = 0; j + 1 < n; j += 2) add_entry(p[j], sums[0]), add_entry(p[j + 1], sums[1]);
    if (n & 1) add_entry(p[n - 1], sums[0]);
    const auto &a = sums[0], &b = sums[1];
    return {V::add(a.p, b.p), V::add(a.v, b.v), V::add(a.pv, b.pv), V::add(a.vv, b.vv)};
  }
  Total move(Floats grow) {
    Total total;
    const int64_t n = rows.n;
    for (int64_t j = 0; j < n;) {  // a few in float32 before the sum goes on in float64
      Floats part[2] = {};
      for (const int64_t stop = j + 8 < n ? j + 8 : n; j < stop; ++j) {
        p[j] = shifted<V>(p[j], grow);
        part[j & 1] = V::add(part[j & 1], p[j]);
      }
      total.add(V::add(part[0], part[1]));
    }
    return total;
  }
  void finish(unsigned solved, FloatMask is_rest, float* const* out) {
    if (solved & V::lanes(is_rest))
      for (int64_t j = 0; j < rows.n; ++j) p[j] = V::blend(is_rest, V::sub(V::set(1), p[j]), p[j]);
    rows.store(solved, p, out);
  }

 private:
  // Of `count` columns; scores that are not finite are left out if `carefully`.
  void describe(const Floats* block, int64_t count, bool carefully) {
    Floats numbers{}, sum[2] = {}, square[2] = {};
    for (int64_t i = 0; i < count; ++i) {
      auto d = V::sub(block[i], origin);
      if (carefully) {
        const auto finite = V::ge(V::set(Limits<float>::largest), V::abs(block[i]));
        d = V::keep(finite, d);
        numbers = V::add(numbers, V::keep(finite, V::set(1)));
      }
      sum[i & 1] = V::add(sum[i & 1], d);
      square[i & 1] = V::fma(d, d, square[i & 1]);
    }
    number += carefully ? numbers : V::set((float)count);
    drifts += sum[0] + sum[1];
    squares += square[0] + square[1];
  }
};

// Rows as they are; p goes to where the result goes. Each row has a vector per sum, and those of all rows are added up at
// once. Lanes from `count` on repeat the first row.
struct LongRows {
  using V = Vec<float>;
  const Row<float>* given;
  float* const* out;
  int count;
  Group rows;
  Floats origin, number, drifts, squares;

  LongRows(const Row<float>* given, float* const* out, int count)
      : given(given), out(out), count(count), rows(given), origin(first_scores(given)) {
    if (!given->mask) describe<false>();
    if (given->mask || V::lanes(V::ge(V::set(Limits<float>::largest), squares)) != kAll) describe<true>();
  }
  const Group& group() const { return rows; }
  Floats drift() const { return V::div(drifts, number); }
  Floats mean() const { return V::add(origin, drift()); }
  Floats variance() const { return V::max(V::fnma(drift(), drift(), V::div(squares, number)), V::set(0)); }
  LaneMoments evaluate(Floats anchor, Floats scale, Floats shift) {
    for (int r = 0; r < count; ++r) {
      const Row<float> row = given[r];
      const Margin<float> margin(anchor[r], scale[r], shift[r]);
      float* p = out[r];
      over(row, [=](auto at) { at.store(p, sigma_of<V>(margin.minus_z<V>(at.scores(row)))); });
    }
    Floats sums[4][kRows];
    for (int r = 0; r < kRows; ++r) {
      const float* p = out[r < count ? r : 0];
      LaneMoments all{};
      in_blocks<false, LaneMoments>([=](auto at, LaneMoments& m) { add_entry(at.load(p), m); }, [&](const LaneMoments& a, const LaneMoments& b) {
        all.p += a.p + b.p, all.v += a.v + b.v, all.pv += a.pv + b.pv, all.vv += a.vv + b.vv;
      });
      sums[0][r] = all.p, sums[1][r] = all.v, sums[2][r] = all.pv, sums[3][r] = all.vv;
    }
    return {row_sums(sums[0]), row_sums(sums[1]), row_sums(sums[2]), row_sums(sums[3])};
  }
  Total move(Floats grow) {
    Doubles sums[kRows];
    for (int r = 0; r < count; ++r) {
      float* p = out[r];
      const auto by = V::set(grow[r]);
      V::wide all;
      in_blocks<false, Floats>([=](auto at, Floats& sum) {
        const auto moved = shifted<V>(at.load(p), by);
        at.store(p, moved);
        sum = V::add(sum, moved);
      }, [&](Floats a, Floats b) { all.add(V::add(a, b)); });
      sums[r] = all.v;
    }
    for (int r = count; r < kRows; ++r) sums[r] = sums[0];
    return {row_sums(sums), row_sums(sums + kRows / 2)};
  }
  void finish(unsigned solved, FloatMask is_rest, float* const*) {
    for (unsigned left = solved & V::lanes(is_rest) & ((1u << count) - 1); left; left &= left - 1) {
      float* p = out[__builtin_ctz(left)];
      over<false>([=](auto at) { at.store(p, V::sub(V::set(1), at.load(p))); });
    }
  }

 private:
  // Calls flush for the two sets of sums of each block, which are added to in turns: no addition waits for the one before.
  template <bool Masked, class Sums, class Body, class Flush> void in_blocks(Body body, Flush flush) const {
    for (int64_t i = 0, n = rows.n; i < n;) {
      const int64_t stop = i + kBlock * kRows < n ? i + kBlock * kRows : n, full = stop - (stop - i) % kRows;
      Sums a{}, b{};
      for (; i + kRows < full; i += 2 * kRows) {
        body(Full<V, Masked>{i}, a);
        body(Full<V, Masked>{i + kRows}, b);
      }
      if (i < full) body(Full<V, Masked>{i}, a);
      if (full < stop) body(Part<V, Masked>{full, stop - full}, b);
      flush(a, b);
      i = stop;
    }
  }
  template <bool Masked, class Body> void over(Body body) const {
    const int64_t n = rows.n, full = n - n % kRows;
    for (int64_t i = 0; i < full; i += kRows) body(Full<V, Masked>{i});
    if (full < n) body(Part<V, Masked>{full, n - full});
  }
  template <class Body> void over(const Row<float>& row, Body body) const {
    if (row.mask) over<true>(body);
    else over<false>(body);
  }
  struct Described {
    Floats number, drift, square;
  };
  // Scores that are not finite, or may not be chosen, are left out if `Carefully`.
  template <bool Carefully> void describe() {
    Floats sums[3][kRows];
    for (int r = 0; r < kRows; ++r) {
      const Row<float> row = given[r];
      const float first = origin[r];
      Described all{};
      const auto add = [=](auto at, Described& to) {
        const auto x = Carefully ? at.scores(row) : at.load(row.x, first);
        auto d = V::sub(x, V::set(first));
        if (Carefully) {
          const auto finite = V::ge(V::set(Limits<float>::largest), V::abs(x));
          d = V::keep(finite, d);
          to.number = V::add(to.number, V::keep(finite, V::set(1)));
        }
        to.drift = V::add(to.drift, d);
        to.square = V::fma(d, d, to.square);
      };
      const auto flush = [&](const Described& a, const Described& b) {
        all = {all.number + (a.number + b.number), all.drift + (a.drift + b.drift), all.square + (a.square + b.square)};
      };
      if (Carefully && row.mask) in_blocks<true, Described>(add, flush);
      else in_blocks<false, Described>(add, flush);
      sums[0][r] = all.number, sums[1][r] = all.drift, sums[2][r] = all.square;
    }
    number = Carefully ? row_sums(sums[0]) : V::set((float)rows.n);
    drifts = row_sums(sums[1]);
    squares = row_sums(sums[2]);
  }
};

// The smaller of k and what it leaves, which is summed: numbers near 1 would round the sum's digits away.
struct Smaller {
  FloatMask is_rest;  // whether 1 − p is summed
  Floats k, n;        // the sum, and how many are summed
  double k64[kRows];
  Smaller(const Group& rows, Floats count)
      : is_rest(Vec<float>::gt(Vec<float>::add(rows.k, rows.k), count)), k(rows.k), n(count) {
    std::memcpy(k64, rows.k64, sizeof k64);
    const unsigned rest = Vec<float>::lanes(is_rest);
    if (!rest) return;
    float rounded[kRows];
    for (int r = 0; r < kRows; ++r) {
      if (rest >> r & 1) k64[r] = (double)rows.n - k64[r];
      rounded[r] = (float)k64[r];
    }
    k = Vec<float>::load(rounded);
    n = Vec<float>::blend(is_rest, Vec<float>::set((float)rows.n), count);
  }
};

// Keeps the thresholds of the rows whose bit is set, if they are wanted.
inline void keep(const Row<float>* given, unsigned which, Floats anchor, Floats shift) {
  if (!given->kept) return;
  for (; which; which &= which - 1) {
    const int r = __builtin_ctz(which);
    given[r].kept->root = {(double)anchor[r], (double)shift[r]};
  }
}

// Solves kRows rows; p is written for those whose bit is NOT set in the result.
template <class Rows> inline unsigned settle_group(const Row<float>* given, Rows& rows, float* const* out) {
  using V = Vec<float>;
  const Group& asked = rows.group();
  const Smaller small(asked, rows.number);
  const auto one = V::set(1), bits = V::set((float)(1 / kLn2));
  // The sign of T makes it σ(−z).
  const auto temperature = V::blend(small.is_rest, V::sub(V::set(0), asked.temperature), asked.temperature);
  const auto scale = V::div(one, temperature);
  // Σp(1 − p) from which on Σp tells the threshold. Normal scores have about 1.6 T·k(1 − k/n)/deviation: rows that have
  // much less are left at once.
  const auto least = V::mul(V::set(0.125f), V::sqrt(V::mul(small.k, V::min(small.k, one))));
  const auto likely = asked.temperature * small.k * (one - small.k / small.n), variance = rows.variance();
  if (!V::lanes(V::not_lt(V::mul(V::set(6.4f), likely), V::mul(least, V::sqrt(variance))))) return kAll;
  auto anchor = normal_guess<V>(rows.number, rows.mean(), variance, asked.k, asked.temperature);
  auto shift = V::set(0), step = V::set(0), variability = V::set(0), bend = V::set(0);
  for (int pass = 0;; ++pass) {
    const LaneMoments m = rows.evaluate(anchor, V::mul(scale, bits), V::mul(shift, bits));
    step = third_order_step<V>(m.p, m.v, m.pv, m.vv, small.n, small.k);
    variability = m.v;
    bend = V::fnma(V::set(2), m.pv, m.v);
    // Where all entries are on the same side, far from it or not, steps on logarithms still lead to the threshold.
    const auto one_side = V::min(m.p, small.n - m.p);
    const auto is_clear = V::either(V::ge(variability, least), V::ge(variability + variability, one_side));
    // NaN counts as small: its row fails below. A few rows are not worth the lanes of all.
    if (4 * __builtin_popcount(V::lanes(is_clear)) < kRows) return kAll;
    if (pass == 2 || V::lanes(V::both(is_clear, V::ge(V::abs(step), V::set(kLongStep)))) == 0) break;
    const auto moved = V::fnma(step, temperature, anchor);
    shift = V::mul(V::add(V::sub(V::sub(anchor, moved), V::mul(step, temperature)), V::mul(shift, temperature)), scale);
    anchor = moved;
  }
  // A long step cannot be a polish; and where nothing is left to choose, or nothing to leave, there is no threshold.
  const auto has_root = V::both(V::gt(small.k, V::set(0)), V::gt(asked.temperature, V::set(0)));
  auto is_near = V::both(V::gt(V::set(kLongStep), V::abs(step)), has_root);
  auto settled = is_near;
  for (int polish = 0; polish < 2; ++polish) {
    const auto most = V::mul(V::max(V::min(step, one), V::set(-1)), bits);
    const auto excess = rows.move(V::sub(power_of_two<V>(most), one)).less(small.k64);
    variability = V::fma(step, bend, variability);
    shift = V::sub(shift, step);
    const auto limit = V::mul(V::set(4 * Limits<float>::eps), variability);
    const auto noise = V::mul(V::set(2 * Limits<float>::eps), V::sqrt(V::mul(small.k, V::min(small.k, one))));
    const auto is_clear = V::ge(V::mul(V::set(4), limit), noise);
    settled = V::both(V::both(is_near, is_clear), V::ge(V::max(limit, noise), V::abs(excess)));
    step = V::sub(V::set(0), V::div(excess, variability));
    is_near = V::both(is_near, V::gt(V::set(kLongStep), V::abs(step)));
    if ((V::lanes(settled) | (~V::lanes(is_near) & kAll)) == kAll) break;  // nothing is left to polish
  }
  const unsigned solved = V::lanes(settled);
  rows.finish(solved, small.is_rest, out);
  keep(given, solved, anchor, V::blend(small.is_rest, V::sub(V::set(0), shift), shift));
  return ~solved & kAll;
}

inline unsigned quick_group(const Row<float>* given, int count, float* const* out) {
  if (given->n <= kNarrow) {
    ShortRows rows(given);
    return settle_group(given, rows, out);
  }
  LongRows rows(given, out, count);
  return settle_group(given, rows, out);
}

}  // namespace
