// The threshold of σ_k for long rows: first that of a sample.
//
// If the sample tells it well, all scores are evaluated there, and the quick way goes on: its steps are short. If Σp rounds
// too much to tell τ, the two tails of sure.h are balanced the same way: stored, moved without exponentials, summed again.
#pragma once

#include "quick.h"
#include "sure.h"

namespace {

constexpr int64_t kSampleRow = 16384;  // a row four times as long is first solved on as many of its scores

static_assert(kSplit == 4 * kSampleRow, "rows of 16 bits are read as they are up to the first, and sampled as floats");
template <class T> inline bool is_long(const Row<T>& row) { return row.n >= 4 * kSampleRow; }

// A row of so many of a long row's scores, copied to `to`, and the k of that row. They lie in runs, a cache line each, at
// places that follow no period.
template <class T> Row<T> sample_of(const Row<T>& row, T* to) {
  constexpr int64_t run = 8;
  const int64_t runs = kSampleRow / run, step = row.n / runs, most = (step - run) / 16 + 1;
  for (int64_t r = 0; r < runs; ++r) {
    const auto chance = (int64_t)((uint32_t)r * 2654435769u >> 8);  // of 24 bits
    const int64_t first = (r * step & ~(int64_t)15) + 16 * (chance * most >> 24);
    for (int64_t i = first; i < first + run; ++i)
      *to++ = allowed(row, i) ? row.x[i] : -std::numeric_limits<T>::infinity();
  }
  return {to - kSampleRow, nullptr, 0, kSampleRow, row.k * (double)kSampleRow / (double)row.n, row.temperature, 1,
          row.exponent, nullptr};
}

// The root of a sample; `room` has as many places.
template <class F, class V, class T> bool sample_root(const Row<T>& sample, T* room, Point<T>* point) {
  if constexpr (F::is_logistic)
    if (solve_quickly<V>(sample, room, true, point)) return true;
  const Census census = count_kinds<V>(sample);
  if (is_settled(sample, census)) return false;
  const Balance found = locate<F, V>(sample, census, true, room, point);
  *point = point->moved(found.step, sample.temperature);
  return true;
}

// What a sample tells of its row at its root.
struct Told {
  double v, deviation;  // Σp(1 − p), and the standard deviation of the root in T
  bool is_broad;        // whether enough scores are undecided: few of them tell nothing of the row's
};

template <class V, class T> Told told_by(const Row<T>& sample, const Point<T>& point, T* room) {
  constexpr double least = 32;
  Margin<T> margin(point, sample.temperature, kLn2);
  if (2 * sample.k > (double)sample.n) margin.flip();  // numbers near 1 would round the variance away
  const Moments m = evaluate<V>(sample, margin, room);
  const double variance = m.p - m.v - m.p * m.p / (double)sample.n;
  return {m.v, std::sqrt(variance > 0 ? variance : 0) / m.v, m.v * m.v > least * m.vv};
}

// The standard deviation of the sum of a sample's changes from one point to another.
template <class V, class T> double change_deviation(const Row<T>& sample, const Point<T>& from, const Point<T>& to) {
  const Margin<T> a(from, sample.temperature, kLn2), b(to, sample.temperature, kLn2);
  double square[1];
  accumulate_row<V, 1>(sample.n, 1, square, [=](auto at, auto* lanes) {
    const auto x = at.load(sample.x);
    const auto change = V::sub(sigma_of<V>(a.template minus_z<V>(x)), sigma_of<V>(b.template minus_z<V>(x)));
    lanes[0] = V::fma(change, change, lanes[0]);
  });
  return std::sqrt(square[0]);
}

// Whether many scores are undecided at a point, for the sure way.
template <class T> bool is_wide_open(const Row<T>& sample, const Point<T>& point) {
  const double n = (double)sample.n, tau = (double)point.anchor + point.shift * sample.temperature;
  const double reach = (2 * std::log(n) + 26) * sample.temperature;
  int64_t open = 0;
  for (int64_t i = 0; i < sample.n; ++i) open += std::fabs((double)sample.x[i] - tau) < reach;
  return 5 * open > sample.n;
}

struct SignedTails {
  double lower, upper, lower_v, upper_v, lower_tv, upper_tv, above;  // as Tails, and Σ tail·tail(1 − tail)
};

// Of the sums below. A side that is much smaller than the other loses digits, but the equation adds |N − k| to it.
inline SignedTails by_sides(const double* s, double above) {
  return {(s[0] + s[1]) / 2, (s[0] - s[1]) / 2, (s[2] + s[3]) / 2, (s[2] - s[3]) / 2, (s[4] + s[5]) / 2,
          (s[4] - s[5]) / 2, above};
}

// Adds up tails t, v = t(1 − t) and tv, each with and without their sign, which is negative above τ.
template <class V, class R> inline void add_tails(R signed_tail, R* lanes) {
  const auto t = V::abs(signed_tail), v = V::fnma(t, t, t), signed_v = V::fnma(signed_tail, t, signed_tail);
  lanes[0] = V::add(lanes[0], t);
  lanes[1] = V::add(lanes[1], signed_tail);
  lanes[2] = V::add(lanes[2], v);
  lanes[3] = V::add(lanes[3], signed_v);
  lanes[4] = V::fma(t, v, lanes[4]);
  lanes[5] = V::fma(t, signed_v, lanes[5]);
}

// Stores the smaller of p and 1 − p, negative if it is 1 − p.
template <class V, class T> SignedTails evaluate_tails(const Row<T>& row, const Point<T>& point, T* out) {
  double s[7];
  const Margin<T> margin(point, row.temperature, kLn2);
  const auto store = [=](auto at) {
    const auto t = margin.template minus_z<V>(at.scores(row));
    at.store(out, V::with_sign(sigma_of<V>(V::abs(t)), t));
  };
  accumulate_scores<V, 7>(row, s, [=](auto at, auto* lanes) {
    const auto stored = at.load(out);
    add_tails<V>(stored, lanes);
    lanes[6] = V::sub(lanes[6], V::minus_one_if_negative(stored));
  }, store);
  return by_sides(s, s[6]);
}

// Moves stored tails by `step` in z, towards a larger τ, and sums them; if it is the last time, p is stored.
template <class V, class T> SignedTails move_tails(const Row<T>& row, double step, bool is_last, double above, T* out) {
  double s[6] = {};
  const T rise = (T)std::expm1(step), fall = (T)std::expm1(-step);
  const auto moved = [=](auto stored, auto is_above) {
    return shifted<V>(V::abs(stored), V::blend(is_above, V::set(rise), V::set(fall)));
  };
  if (is_last) {
    accumulate_row<V, 1>(row.n, row.threads, s, [=](auto at, auto*) {
      const auto stored = at.load(out);
      const auto is_above = (typename V::mask_t)stored < 0;
      const auto t = moved(stored, is_above);
      at.store(out, V::blend(is_above, V::sub(V::set(1), t), t));
    });
  } else {
    accumulate_row<V, 6>(row.n, row.threads, s, [=](auto at, auto* lanes) {
      const auto stored = at.load(out);
      const auto t = V::with_sign(moved(stored, (typename V::mask_t)stored < 0), stored);
      at.store(out, t);
      add_tails<V>(t, lanes);
    });
  }
  return by_sides(s, above);
}

// As `settle_sum`, by balanced tails. The scores above the first point stay on their side of the equation.
template <class V, class T, class Leap>
bool settle_tails(const Row<T>& row, bool just_p, T* p, Point<T>* point, Leap leap) {
  const double eps = (double)Limits<T>::eps, tolerance = std::sqrt(eps) / (just_p ? 1 : 10), least = row.k < 1 ? row.k : 1;
  const double faint = (double)Limits<T>::tiny * (double)row.n / eps;
  for (int pass = 0; pass < 2; ++pass) {
    SignedTails t = evaluate_tails<V>(row, *point, p);
    for (int i = 0; i < 4; ++i) {
      const double excess = t.above - row.k, left = t.lower + (excess > 0 ? excess : 0),
                   right = t.upper + (excess < 0 ? -excess : 0), ratio = std::log(left) - std::log(right);
      const bool is_nothing = just_p && std::fabs(left - right) <= eps / 8 * least;
      if (!is_nothing && !(left > faint && right > faint)) return false;
      // Halley's step on the ratio, whose derivatives are −slope and `bend`.
      const double a = t.lower_v / left, b = t.upper_v / right, slope = a + b;
      const double bend = (t.lower_v - 2 * t.lower_tv) / left - a * a - (t.upper_v - 2 * t.upper_tv) / right + b * b;
      const double newton = ratio / slope, give = newton * bend / slope / 2;
      const double step = is_nothing ? 0 : std::fabs(give) < 0.5 ? newton / (1 - give) : newton;
      if (!std::isfinite(step)) return false;
      if (std::fabs(step) >= kLongStep) {
        if (!leap(t.above + t.lower - t.upper, step)) return false;
        break;
      }
      const bool is_last = is_nothing || std::fabs(step) <= tolerance;
      *point = point->moved(step, row.temperature);
      t = move_tails<V>(row, step, is_last, t.above, p);
      if (is_last) return true;
    }
  }
  return false;
}

// The guess of a long row, or of any. `scratch` has n places, so that no thread needs a large stack.
template <class V, class T> bool guess(const Row<T>& row, T* scratch, double* count, Point<T>* point) {
  if (!is_long(row)) return guess<V>(row, count, point);
  const Row<T> sample = sample_of(row, scratch);
  if (!sample_root<Logistic, V>(sample, scratch + kSampleRow, point)) return false;
  const Told told = told_by<V>(sample, *point, scratch + kSampleRow);
  return told.is_broad && told.deviation < 1;
}

// As `solve_quickly`, for long rows. `just_p`: the point may be anywhere where p is the same.
template <class V, class T> bool solve_long(const Row<T>& row, bool just_p, T* p, Point<T>* point) {
  constexpr double most_leap = 30, most_deviation = 4.5, most_error = 2;
  if (!(row.k > 0 && row.k < (double)row.n && row.temperature > 0)) return false;
  T* room = p + kSampleRow;
  const Row<T> first = sample_of(row, p);
  if (!sample_root<Logistic, V>(first, room, point)) return false;
  const Told told = told_by<V>(first, *point, room);
  // A sharp root is better left to the sure way, which sums few scores; else Σp of all scores leads to it.
  const bool is_near = told.deviation < 1.2 || (told.deviation < most_deviation && told.deviation < 4 * told.v);
  if (!(told.is_broad ? is_near : is_wide_open(first, *point))) return false;
  int leaps = 0;
  const auto leap = [&](double sum, double step) {
    if (++leaps > 2 || std::fabs(step) > most_leap) return false;
    const Point<T> there = point->moved(step, row.temperature);
    if (told.is_broad) {
      // What the row's sum lacks at the point, its sample is to lack there too: what it has by chance does not matter.
      Row<T> sample = sample_of(row, p);
      const Tails t = tails<Logistic, V>(sample, *point);
      const double lacks = (row.k - sum) * (double)kSampleRow / (double)row.n;
      sample.k = t.above + t.lower - t.upper + lacks;
      Point<T> other = *point;
      if (!(sample.k > 0 && sample.k < (double)kSampleRow && sample_root<Logistic, V>(sample, room, &other))) return false;
      const double error = change_deviation<V>(sample, *point, other) / told_by<V>(sample, other, room).v;
      if (!(error < most_error)) return false;
      // The step from all scores is as good where it does not contradict the sample.
      const double apart = ((double)other.anchor - (double)there.anchor) / row.temperature + other.shift - there.shift;
      *point = std::fabs(apart) < 2 * error ? there : other;
    } else {
      *point = there;
    }
    return true;
  };
  const double n = (double)row.n, k = 2 * row.k > n ? n - row.k : row.k, scale = n / (double)kSampleRow;
  // The lanes of a long row round more than its entries do.
  constexpr double most_noise = 6;
  if (2 * std::sqrt(k < 1 ? k * k : k) <= most_noise * told.v * scale) {
    const Settled settled = settle_sum<V>(row, n, false, most_noise, p, point, leap);
    // Where few scores are undecided, and Σp cannot tell, the root depends on scores that the sample lacks.
    if (settled != Settled::unclear || !told.is_broad) return settled == Settled::yes;
  }
  return settle_tails<V>(row, just_p, p, point, leap);
}

}  // namespace
