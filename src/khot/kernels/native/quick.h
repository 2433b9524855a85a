// The quick way to the threshold of σ_k, for smooth rows.
//
// A guess from the mean and the variance, one pass of exponentials that stores p and sums its first
// moments, a third-order step, and then p is moved by that step with one division and no exponential. It is accepted
// only on the re-summed Σp.
#pragma once

#include "half.h"
#include "point.h"

namespace {

constexpr double kPi = 3.14159265358979323846, kLn2 = 0.69314718055994530942;
constexpr float kLongStep = 0.5f;  // in z: from here on p is computed anew, not shifted

struct Moments {
  double p, v, pv, vv;  // Σp, Σv, Σpv, Σv² with v = p(1 − p)
};

// p = σ(z), or its complement σ(−z), stored, and its moments. The margin is in units of T ln 2.
template <class V, class T> Moments evaluate(const Row<T>& row, const Margin<T>& margin, T* out) {
  double sums[4];
  const auto sum = [=](auto at, auto* lanes) {
    const auto p = at.load(out), v = V::fnma(p, p, p);
    lanes[0] = V::add(lanes[0], p);
    lanes[1] = V::add(lanes[1], v);
    lanes[2] = V::fma(p, v, lanes[2]);
    lanes[3] = V::fma(v, v, lanes[3]);
  };
  with_scores(row, [&](auto read) {
    accumulate_scores<V, 4>(row, sums, sum, [=](auto at) {
      __builtin_prefetch(row.x + at.i + row.ahead, 0, 2);
      const auto x = at.allowed(row, read(at, -std::numeric_limits<T>::infinity()));
      at.store(out, sigma_of<V>(margin.template minus_z<V>(x)));
    });
  });
  return {sums[0], sums[1], sums[2], sums[3]};
}

// q ← σ(logit q + step) in place, or 1 less that, for grow = e^step − 1; Σ of the shifted q. What takes so long to divide
// is rounded to 16 bits meanwhile, if they are wanted.
template <class V, class T> double shift_by(const Row<T>& row, T grow, bool complement, T* q) {
  double sum[1];
  const auto pass = [&](auto keep) {
    accumulate_row<V, 1>(row.n, row.threads, sum, [=](auto at, auto* lanes) {
      const auto moved = shifted<V>(at.load(q), V::set(grow)), p = complement ? V::sub(V::set(1), moved) : moved;
      at.store(q, p);
      keep(at, p);
      lanes[0] = V::add(lanes[0], moved);
    });
  };
  if constexpr (sizeof(T) == 4) {
    if (row.kept) {
      uint16_t* to = row.kept->y;
      with_halves(row.kept->dtype, [&](auto h) {
        with_past(row.kept->goes_past, to, [&](auto past) {
          pass([=](auto at, auto p) { write<decltype(h), past>(at, to, p); });
        });
      });
      return sum[0];
    }
  }
  pass([](auto, auto) {});
  return sum[0];
}

// The step d in z that brings Σp to k, from three derivatives of logit(Σp/n): straight for ties, nearly so at both ends.
// r + g₁d + g₂d² + g₃d³ = 0 by its reversed series, and Newton's method from there. A lane per row, and V may be one lane.
template <class V, class R = typename V::reg> inline R third_order_step(R p, R v, R pv, R vv, R n, R k) {
  const R one = V::set(1), two = V::set(2), half = V::set(0.5f), q = n - p;
  const R a = n / (p * q), c = (q - p) / n, v2 = v - two * pv, v3 = v - V::set(6) * vv;
  const R g1 = a * v, g2 = half * (a * v2 - c * g1 * g1);
  const R g3 = V::set(1.0f / 6) * (two * g1 * g1 * (v / n + c * c * g1) - V::set(3) * c * g1 * a * v2 + a * v3);
  const R r = V::log(p * (n - k) / (k * q)), inverse = one / g1, newton = -r * inverse;
  const R b2 = g2 * inverse * newton, b3 = g3 * inverse * newton * newton;
  const R d = newton * (one - b2 + two * b2 * b2 - b3);
  const R slope = g1 + d * (two * g2 + V::set(3) * d * g3), better = d - (r + d * (g1 + d * (g2 + d * g3))) / slope;
  const auto is_steep = V::gt(slope, V::set(0.25f) * g1), is_near = V::ge(two * V::abs(newton), V::abs(better));
  return V::blend(V::both(is_steep, is_near), better, newton);
}

// A first guess of τ for normal scores: E σ(x − τ) is nearly σ of a wider logistic, and at most E e^{x − τ}, which is
// sharper in the tail. A lane per row.
template <class V, class R = typename V::reg> inline R normal_guess(R count, R mean, R variance, R k, R temperature) {
  const R share = V::log(k / count), rest = V::log((count - k) / count);
  const R width = V::sqrt(temperature * temperature + V::set((float)(kPi / 8)) * variance);
  const R middle = mean - (share - rest) * width, drift = V::set(0.5f) * variance / temperature;
  const R above = mean + drift - temperature * share, below = mean - drift + temperature * rest;
  return V::blend(V::gt(count, k + k), V::min(middle, above), V::max(middle, below));
}

// The first of the numbers at(i) that is finite and may be chosen; 0 if none is.
template <class T, class At> T first_finite(const Row<T>& row, At at) {
  for (int64_t i = 0; i < row.n; ++i)
    if (const T x = at(i); allowed(row, i) && std::fabs(x) <= Limits<T>::largest) return x;
  return 0;
}

// Number, mean and variance of the finite allowed scores.
template <class V, class T, class Read>
bool describe(const Row<T>& row, Read read, double* count, double* mean, double* variance) {
  const T origin = first_finite(row, [=](int64_t i) { return T(read(Part<V>{i, 1}, T(0))[0]); });
  double sums[3];
  if (!row.mask) {  // most rows are finite, and then so are their squares
    accumulate_row<V, 2>(row.n, row.threads, sums + 1, [=](auto at, auto* lanes) {
      const auto d = V::sub(read(at, origin), V::set(origin));
      lanes[0] = V::add(lanes[0], d);
      lanes[1] = V::fma(d, d, lanes[1]);
    });
    sums[0] = (double)row.n;
  }
  if (row.mask || !std::isfinite(sums[2])) accumulate_scores<V, 3>(row, sums, [=](auto at, auto* lanes) {
    const auto x = at.allowed(row, read(at, -std::numeric_limits<T>::infinity()));
    const auto finite = V::ge(V::set(Limits<T>::largest), V::abs(x));
    const auto d = V::keep(finite, V::sub(x, V::set(origin)));
    lanes[0] = V::add(lanes[0], V::keep(finite, V::set(1)));
    lanes[1] = V::add(lanes[1], d);
    lanes[2] = V::fma(d, d, lanes[2]);
  });
  *count = sums[0];
  const double drift = sums[1] / sums[0];
  *mean = (double)origin + drift;
  *variance = sums[2] / sums[0] - drift * drift;
  return std::isfinite(*mean) && std::isfinite(*variance);
}

// A first guess of τ, for normal scores of the row's mean and variance.
template <class V, class T> bool guess(const Row<T>& row, double* count, Point<T>* point) {
  double mean, variance;
  const bool is_described =
      with_scores(row, [&](auto read) { return describe<V>(row, read, count, &mean, &variance); });
  if (!is_described || !(row.k < *count)) return false;
  const double tau = normal_guess<Scalar<double>>(*count, mean, variance > 0 ? variance : 0, row.k, row.temperature);
  *point = Point<T>::at(tau, 0, row.temperature);
  return std::isfinite(tau);
}

// Keeps the threshold of a row, if it is wanted.
template <class T> void keep(const Row<T>& row, const Point<T>& point) {
  if (row.kept) row.kept->root = {(double)point.anchor, point.shift};
}

// Unclear: Σp rounds too much to tell where the root is; the point may be near it.
enum class Settled { no, unclear, yes };

// Steps from a guess. Yes: p is σ_k and the point its threshold, to rounding; otherwise p holds nothing. `roughly`: the
// point, to a thousandth. `most_noise`: of Σp, in eps·v, to be clear. After a long step all is computed anew where `leap`
// says, given Σp at the point and the step; false: nowhere.
template <class V, class T, class Leap>
Settled settle_sum(const Row<T>& row, double count, bool roughly, double most_noise, T* p, Point<T>* point, Leap leap) {
  // The smaller of p and 1 − p is summed: numbers near 1 would round the sum's digits away.
  const bool complement = 2 * row.k > count;
  const double n = complement ? (double)row.n : count, k = complement ? n - row.k : row.k, sign = complement ? -1 : 1;
  const double eps = (double)Limits<T>::eps;
  for (int pass = 0; pass < 4; ++pass) {
    Margin<T> margin(*point, row.temperature, kLn2);
    if (complement) margin.flip();
    Moments m = evaluate<V>(row, margin, p);
    if (!(m.p > 0 && m.p < n && m.v > 0)) return Settled::no;
    double step = third_order_step<Scalar<double>>(m.p, m.v, m.pv, m.vv, n, k);
    if (!std::isfinite(step)) return Settled::no;
    const double noise = 2 * eps * std::sqrt(m.p < 1 ? m.p * m.p : m.p);
    if (!roughly && noise > most_noise * eps * m.v) return Settled::unclear;
    // In a step d, v grows at most by e^|d|: if a short one cannot bring Σp to k, its derivatives mislead.
    const bool is_far = std::fabs(k - m.p) > kLongStep * std::exp(kLongStep) * m.v;
    if (is_far && std::fabs(step) < kLongStep) step = k > m.p ? kLongStep : -kLongStep;
    if (std::fabs(step) >= kLongStep) {
      if (!leap(complement ? n - m.p : m.p, -sign * step)) return Settled::no;
      continue;
    }
    *point = point->moved(-sign * step, row.temperature);
    if (roughly) return Settled::yes;
    double last = std::numeric_limits<double>::infinity();
    for (int polish = 0; polish < 3; ++polish) {
      const double sum = shift_by<V>(row, (T)std::expm1(step), complement, p);
      m.v += step * (m.v - 2 * m.pv);
      const double limit = 4 * eps * m.v;
      // With ties all roundings agree. A sum that is within some of k, and comes no nearer, is as near as sums come.
      if (std::fabs(sum - k) <= (limit > noise ? limit : noise) ||
          (std::fabs(sum - k) >= last && last <= 16 * Limits<double>::eps * k)) {
        if (row.kept) row.kept->has_written = true;
        return Settled::yes;
      }
      const bool is_stuck = std::fabs(sum - k) > last / 2;
      last = std::fabs(sum - k);
      step = (k - sum) / m.v;
      *point = point->moved(-sign * step, row.temperature);
      if (is_stuck && std::fabs(step) < 1e-3) return Settled::unclear;
      if (complement || !(std::fabs(step) < 0.1)) break;
    }
  }
  return Settled::unclear;
}

// True if p is σ_k and the point its threshold, as `settle_sum`.
template <class V, class T> bool solve_quickly(const Row<T>& row, T* p, bool roughly, Point<T>* point) {
  double count;
  if (!(row.k > 0 && row.k < (double)row.n && row.temperature > 0)) return false;
  if (!guess<V>(row, &count, point)) return false;
  const auto leap = [&](double, double step) {
    *point = point->moved(step, row.temperature);
    return true;
  };
  return settle_sum<V>(row, count, roughly, 16, p, point, leap) == Settled::yes;
}

}  // namespace
