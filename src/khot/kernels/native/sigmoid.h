// σ_k of one row: p = σ((x − τ)/T) with Σ p = k; and the same for the cdfs of cdfs.h.
//
// Two ways to the threshold. The quick one fits smooth rows of σ_k: a guess from the mean and the variance (or from a sample), one
// pass of exponentials that stores p and sums its first moments, a third-order step, and then p is moved by that step with one
// division and no exponential. It is accepted only on the re-summed Σ p. The sure one fits everything else: the two order
// statistics around k bracket τ within a few dozen T, the scores that can still be undecided there are gathered, and Newton's
// method with bisection balances the two tails, Σ_{z≤0} σ(z) + (N−k)⁺ = Σ_{z>0} σ(−z) + (N−k)⁻, in which nothing cancels.
#pragma once

#include "cdfs.h"
#include "row.h"
#include "select.h"

namespace {

// τ = anchor + T·shift: the anchor is a score-sized number near τ, the shift the rest in units of T.
template <class T> struct Point {
  T anchor;
  double shift;

  static Point at(double anchor, double shift, double temperature) {
    const double tau = anchor + temperature * shift;
    double near = (double)(T)tau;
    if (!(std::fabs(near) <= (double)Limits<T>::largest)) near = anchor;
    return {(T)near, shift - (near - anchor) / temperature};
  }
  Point moved(double step, double temperature) const { return at((double)anchor, shift + step, temperature); }
};

// −z = (anchor − x)/T + shift. Bodies capture it, and all else, by value: what they store might alias a reference.
template <class T> struct Margin {
  T anchor, scale, shift;
  Margin(const Point<T>& point, double temperature)
      : anchor(point.anchor), scale((T)(1.0 / temperature)), shift((T)point.shift) {}
  template <class V> typename V::reg minus_z(typename V::reg x) const {
    return V::fma(V::sub(V::set(anchor), x), V::set(scale), V::set(shift));
  }
  void flip() { scale = -scale, shift = -shift; }  // z instead of −z
};

// ── the quick way ────────────────────────────────────────────────────────────────────────────────────────────────────

constexpr double kPi = 3.14159265358979323846;
constexpr float kLongStep = 0.5f;  // in z: from here on p is computed anew, not shifted

struct Moments {
  double p, v, pv, vv;  // Σp, Σv, Σpv, Σv² with v = p(1 − p)
};

// p = σ(z), or its complement σ(−z), stored, and its moments.
template <class V, class T> Moments evaluate(const Row<T>& row, const Point<T>& point, bool complement, T* out) {
  double sums[4];
  Margin<T> margin(point, row.temperature);
  if (complement) margin.flip();
  accumulate_row<V, 4>(row.n, row.threads, sums, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto p = sigma_of<W>(margin.template minus_z<W>(load<W>(row, i)));
    W::store(out + i, p);
    const auto v = W::fnma(p, p, p);
    lanes[0] = W::add(lanes[0], p);
    lanes[1] = W::add(lanes[1], v);
    lanes[2] = W::fma(p, v, lanes[2]);
    lanes[3] = W::fma(v, v, lanes[3]);
  });
  return {sums[0], sums[1], sums[2], sums[3]};
}

// q ← σ(logit q + step) in place, or 1 less that; Σ of the shifted q.
template <class V, class T> double shift_by(const Row<T>& row, double step, bool complement, T* q) {
  const T grow = (T)std::expm1(step);
  double sum[1];
  accumulate_row<V, 1>(row.n, row.threads, sum, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto moved = shifted<W>(W::load(q + i), W::set(grow));
    W::store(q + i, complement ? W::sub(W::set(1), moved) : moved);
    lanes[0] = W::add(lanes[0], moved);
  });
  return sum[0];
}

// The step in z that brings Σp to k, from three derivatives of logit(Σp/n): straight for ties, nearly so at both ends. A lane
// per row, and V may be one lane.
template <class V, class R = typename V::reg> inline R third_order_step(R p, R v, R pv, R vv, R n, R k) {
  const R one = V::set(1), two = V::set(2), half = V::set(0.5f), third = V::set(1.0f / 3);
  const R s = p / n, c = one - two * s;
  const R s1 = v / n, s2 = (v - two * pv) / n, s3 = (v - V::set(6) * vv) / n;
  const R l1 = one / (s * (one - s)), l2 = -c * l1 * l1, l3 = two * l1 * l1 * (one + c * c * l1);
  const R g1 = l1 * s1, g2 = half * (l2 * s1 * s1 + l1 * s2);
  const R g3 = half * third * (l3 * s1 * s1 * s1 + V::set(3) * l2 * s1 * s2 + l1 * s3);
  const R r = V::log(p / k) - V::log((n - p) / (n - k)), newton = -r / g1;
  R d = newton;
  auto usable = V::ge(one, one);
  for (int i = 0; i < 3; ++i) {
    const R f = r + d * (g1 + d * (g2 + d * g3)), slope = g1 + d * (two * g2 + V::set(3) * d * g3);
    usable = V::both(usable, V::gt(slope, V::set(0.25f) * g1));
    d = d - f / slope;
  }
  usable = V::both(usable, V::ge(two * V::abs(newton), V::abs(d)));
  return V::blend(usable, d, newton);
}

// A first guess of τ for normal scores: E σ(x − τ) is nearly σ of a wider logistic, and at most E e^{x − τ}, which is sharper in
// the tail. A lane per row.
template <class V, class R = typename V::reg> inline R normal_guess(R count, R mean, R variance, R k, R temperature) {
  const R share = V::log(k / count), rest = V::log((count - k) / count);
  const R width = V::sqrt(temperature * temperature + V::set((float)(kPi / 8)) * variance);
  const R middle = mean - (share - rest) * width, drift = V::set(0.5f) * variance / temperature;
  const R above = mean + drift - temperature * share, below = mean - drift + temperature * rest;
  return V::blend(V::gt(count, k + k), V::min(middle, above), V::max(middle, below));
}

// Number, mean and variance of the finite allowed scores.
template <class V, class T> bool describe(const Row<T>& row, double* count, double* mean, double* variance) {
  double reference = 0;
  for (int64_t i = 0; i < row.n; ++i) {
    if (allowed(row, i) && std::fabs(row.x[i]) <= Limits<T>::largest) {
      reference = (double)row.x[i];
      break;
    }
  }
  const T origin = (T)reference;
  double sums[3];
  accumulate_row<V, 3>(row.n, row.threads, sums, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto x = load<W>(row, i);
    const auto finite = W::ge(W::set(Limits<T>::largest), W::abs(x));
    const auto d = W::keep(finite, W::sub(x, W::set(origin)));
    lanes[0] = W::add(lanes[0], W::keep(finite, W::set(1)));
    lanes[1] = W::add(lanes[1], d);
    lanes[2] = W::fma(d, d, lanes[2]);
  });
  *count = sums[0];
  const double drift = sums[1] / sums[0];
  *mean = reference + drift;
  *variance = sums[2] / sums[0] - drift * drift;
  return std::isfinite(*mean) && std::isfinite(*variance);
}

constexpr int64_t kSampleRow = 16384;  // a row four times as long is first solved on as many of its scores

template <class V, class T> bool solve_quickly(const Row<T>& row, T* p, bool roughly, Point<T>* point);

// A first guess of τ: that of a sample, or of a normal distribution with the row's mean and variance. `scratch` has n places,
// so that no thread needs a large stack.
template <class V, class T> bool guess(const Row<T>& row, T* scratch, double* count, Point<T>* point) {
  if (row.n >= 4 * kSampleRow) {
    constexpr int64_t run = 8;  // neighbours are taken together, a cache line at a time
    T *sample = scratch, *chosen = scratch + kSampleRow;
    const int64_t runs = kSampleRow / run, step = (row.n / runs) & ~(int64_t)15;
    for (int64_t r = 0; r < runs; ++r)
      for (int64_t i = 0; i < run; ++i) {
        const int64_t at = r * step + i;
        sample[r * run + i] = allowed(row, at) ? row.x[at] : -std::numeric_limits<T>::infinity();
      }
    *count = (double)row.n;
    Row<T> part = {sample, nullptr, 0, kSampleRow, row.k * (double)kSampleRow / (double)row.n, row.temperature, 1};
    return solve_quickly<V>(part, chosen, true, point);
  }
  double mean, variance;
  if (!describe<V>(row, count, &mean, &variance) || !(row.k < *count)) return false;
  const double tau = normal_guess<Scalar<double>>(*count, mean, variance > 0 ? variance : 0, row.k, row.temperature);
  *point = Point<T>::at(tau, 0, row.temperature);
  return std::isfinite(tau);
}

// True if p is σ_k and the point its threshold, to rounding; otherwise p holds nothing. `roughly`: the point, to a thousandth.
template <class V, class T> bool solve_quickly(const Row<T>& row, T* p, bool roughly, Point<T>* point) {
  double count;
  if (!(row.k > 0 && row.k < (double)row.n && row.temperature > 0)) return false;
  if (!guess<V>(row, p, &count, point)) return false;
  // The smaller of p and 1 − p is summed: numbers near 1 would round the sum's digits away.
  const bool complement = 2 * row.k > count;
  const double n = complement ? (double)row.n : count, k = complement ? n - row.k : row.k, sign = complement ? -1 : 1;
  const double eps = (double)Limits<T>::eps;
  for (int pass = 0; pass < 4; ++pass) {
    Moments m = evaluate<V>(row, *point, complement, p);
    if (!(m.p > 0 && m.p < n && m.v > 0)) return false;
    const double noise = 2 * eps * std::sqrt(m.p < 1 ? m.p * m.p : m.p);
    if (!roughly && noise > 16 * eps * m.v) return false;  // the sum rounds too much to tell where the root is
    double step = third_order_step<Scalar<double>>(m.p, m.v, m.pv, m.vv, n, k);
    if (!std::isfinite(step)) return false;
    *point = point->moved(-sign * step, row.temperature);
    if (std::fabs(step) >= kLongStep) continue;
    if (roughly) return true;
    for (int polish = 0; polish < 3; ++polish) {
      const double sum = shift_by<V>(row, step, complement, p);
      m.v += step * (m.v - 2 * m.pv);
      const double limit = 4 * eps * m.v;
      if (std::fabs(sum - k) <= (limit > noise ? limit : noise)) return true;
      step = (k - sum) / m.v;
      *point = point->moved(-sign * step, row.temperature);
      if (complement || !(std::fabs(step) < 0.1)) break;
    }
  }
  return false;
}

// ── the sure way ─────────────────────────────────────────────────────────────────────────────────────────────────────

struct Tails {
  double lower, upper, lower_v, upper_v, above;  // Σ tail and Σ tail(1 − tail) on either side of τ, and the number above
};

template <class F, class V, class T> Tails tails(const T* x, int64_t n, int threads, const Point<T>& point, double temperature) {
  double sums[5];
  const Margin<T> margin(point, temperature);
  accumulate_row<V, 5>(n, threads, sums, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto at = F::template at<W>(margin.template minus_z<W>(W::load(x + i)));
    lanes[0] = W::add(lanes[0], at.tail);
    lanes[1] = W::add(lanes[1], W::keep(at.above, at.tail));
    lanes[2] = W::add(lanes[2], at.density);
    lanes[3] = W::add(lanes[3], W::keep(at.above, at.density));
    lanes[4] = W::add(lanes[4], W::keep(at.above, W::set(1)));
  });
  const double lower = sums[0] - sums[1], lower_v = sums[2] - sums[3];  // may round to less than 0
  return {lower > 0 ? lower : 0, sums[1], lower_v > 0 ? lower_v : 0, sums[3], sums[4]};
}

// y = F(z − step) written from its smaller tail, so that 0 and 1 are exact; the step is so small that its square is nothing.
template <class F, class V, class T> void write(const Row<T>& row, const Point<T>& point, double step, T* out) {
  double none[1];
  const T small = (T)step;
  const Margin<T> margin(point, row.temperature);
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto tag, int64_t i, auto*) {
    using W = decltype(tag);
    const auto at = F::template at<W>(margin.template minus_z<W>(load<W>(row, i)));
    const auto y = W::blend(at.above, W::sub(W::set(1), at.tail), at.tail);
    const auto moved = W::fnma(at.density, W::set(small), y);
    W::store(out + i, W::max(W::blend(W::gt(moved, W::set(1)), W::set(1), moved), W::set(0)));
  });
}

// Whether the row has no finite threshold.
template <class T> bool is_settled(const Row<T>& row, const Census& census) {
  const double rest = row.k - (double)census.infinite;
  return census.nan || !(row.temperature > 0 && rest > 0 && rest < (double)census.finite);
}

// Writes the p of such a row.
template <class T> void settle(const Row<T>& row, const Census& census, T* p) {
  const double k = row.k, rest = k - (double)census.infinite;
  const T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  if (census.nan || !(k >= 0 && rest <= (double)census.finite && row.temperature > 0)) {
    for (int64_t i = 0; i < row.n; ++i) p[i] = nan;
  } else if (rest <= 0) {  // the entries of +inf share k; at most 1 each, and then exactly 1
    const T share = census.infinite ? (T)(k / (double)census.infinite) : T(0);
    for (int64_t i = 0; i < row.n; ++i) p[i] = allowed(row, i) && row.x[i] == inf ? share : T(0);
  } else {
    for (int64_t i = 0; i < row.n; ++i) p[i] = allowed(row, i) && row.x[i] > -inf ? T(1) : T(0);
  }
}

constexpr int kMaxHalvings = 200;  // the bracket is a few hundred T wide, and float64 has 52 bits

struct Balance {
  bool is_root;  // log(left/right) = 0 to rounding; else the two sides agree as far as p can tell, or nothing is known
  double step;   // what is still missing at the point, in units of T
};

// Newton's method on log(left/right) inside a bracket of shifts, falling back on its middle. `decided` scores lie above.
template <class F, class V, class T>
Balance balance(const T* x, int64_t n, int threads, double decided, double k, double temperature, bool just_p, double anchor,
                double low, double high, Point<T>* point) {
  const double eps = (double)Limits<T>::eps, tolerance = F::is_smooth ? std::sqrt(eps) / 10 : 4 * eps;
  double shift = low / 2 + high / 2, last = high - low;
  for (int i = 0; i <= kMaxHalvings; ++i) {
    *point = Point<T>::at(anchor, shift, temperature);
    const Tails t = tails<F, V>(x, n, threads, *point, temperature);
    const double excess = decided + t.above - k;
    const double left = t.lower + (excess > 0 ? excess : 0), right = t.upper + (excess < 0 ? -excess : 0);
    const double ratio = std::log(left) - std::log(right), slope = t.lower_v / left + t.upper_v / right, step = ratio / slope;
    const double underflow = (double)Limits<T>::tiny * (double)n, rounding = just_p ? eps / 8 * (k < 1 ? k : 1) : 0;
    if (std::fabs(ratio) <= tolerance) return {left > underflow / eps && right > underflow / eps, step};
    // Entries err all in one direction, so none is off by more than |left − right|.
    if (std::fabs(left - right) <= (rounding > underflow ? rounding : underflow)) return {false, 0};
    (ratio > 0 ? low : high) = shift;
    const double ends = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
    if (high - low <= 2 * Limits<double>::eps * ends) return {false, 0};  // no room is left
    double next = shift + step;
    if (!(next > low && next < high && std::fabs(step) <= last / 2)) next = low / 2 + high / 2;
    last = std::fabs(next - shift);
    shift = next;
  }
  // A bracket halved so often is a point. With a slope that has a bound this cannot be, and must not pass for an answer.
  return {false, F::is_smooth ? std::numeric_limits<double>::quiet_NaN() : 0};
}

// The rows that have a finite threshold: where it is, or if just p is wanted, where it might as well be. p serves as scratch space.
template <class F, class V, class T>
Balance locate(const Row<T>& row, const Census& census, bool just_p, T* p, Point<T>* point) {
  const double k = row.k - (double)census.infinite, part = k - std::floor(k), finite = (double)census.finite;
  const double share = part == 0 ? 1 : (part < 0.5 ? part : 1 - part);
  const double reach = F::reach(finite / share), certain = F::template certain<T>(finite);
  T upper, lower;
  const bool is_whole = census.finite == row.n && !row.mask;
  if (!is_whole) gather<V>(row, true, p);
  select_ranks<V>(is_whole ? row.x : p, census.finite, row.threads, (int64_t)std::ceil(k), (int64_t)std::floor(k) + 1, p, &upper,
                  &lower);
  const double gap = ((double)upper - (double)lower) / row.temperature, middle = (double)upper / 2 + (double)lower / 2;
  const bool is_wide = gap > 2 * (reach + certain);
  if (is_wide && just_p) {
    *point = Point<T>::at(middle, 0, row.temperature);
    return {false, 0};
  }
  const double margin = (reach + certain) * row.temperature;
  const T high = (T)((double)upper + margin), low = (T)((double)lower - margin);
  double decided[1];
  accumulate_row<V, 1>(row.n, row.threads, decided, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    lanes[0] = W::add(lanes[0], W::keep(W::gt(load<W>(row, i), W::set(high)), W::set(1)));
  });
  const int64_t open = pack_row<V>(row.n, p, [=](auto tag, int64_t i, auto* x) {
    using W = decltype(tag);
    *x = load<W>(row, i);
    return W::both(W::ge(W::set(high), *x), W::ge(*x, W::set(low)));
  });
  if (is_wide) {  // each tail is exponential in τ, and balances the other half way between two points at which they are equal
    const auto near_lower = Point<T>::at((double)lower, certain, row.temperature);
    const auto near_upper = Point<T>::at((double)upper, -certain, row.temperature);
    const double left = tails<F, V>(p, open, row.threads, near_lower, row.temperature).lower;
    const double right = tails<F, V>(p, open, row.threads, near_upper, row.temperature).upper;
    *point = Point<T>::at(middle, (std::log(left) - std::log(right)) / 2, row.temperature);
    return {true, 0};
  }
  return balance<F, V>(p, open, row.threads, decided[0], row.k, row.temperature, just_p, (double)upper, -gap - reach, reach,
                       point);
}

template <class F, class V, class T> void solve_row(const Row<T>& row, T* p) {
  Point<T> point;
  if (F::is_logistic && solve_quickly<V>(row, p, false, &point)) return;
  const Census census = count_kinds<V>(row);
  if (is_settled(row, census)) return settle(row, census, p);
  const Balance found = locate<F, V>(row, census, true, p, &point);
  write<F, V>(row, point, found.step, p);
}

// z = (x − τ)/T. False, and z holds nothing, where the threshold is infinite, or is decided by numbers too small to be summed.
template <class V, class T> bool margin_row(const Row<T>& row, T* z) {
  Point<T> point;
  if (!solve_quickly<V>(row, z, false, &point)) {
    const Census census = count_kinds<V>(row);
    if (is_settled(row, census)) return false;
    const Balance found = locate<Logistic, V>(row, census, false, z, &point);
    if (!found.is_root) return false;
    point = point.moved(found.step, row.temperature);
  }
  double none[1];
  const Margin<T> margin(point, row.temperature);
  accumulate_row<V, 1>(row.n, row.threads, none, [=](auto tag, int64_t i, auto*) {
    using W = decltype(tag);
    W::store(z + i, W::sub(W::set(0), margin.template minus_z<W>(load<W>(row, i))));
  });
  return true;
}

// ── derivative ───────────────────────────────────────────────────────────────────────────────────────────────────────

// dx = v(g − ḡ)/T; returns dk = ḡ, with v = F′ as a function of p = F(z), and ḡ = Σvg/Σv.
template <class F, class V, class T>
double pull_row(const T* p, const T* g, int64_t n, double temperature, int threads, T* dx) {
  double sums[2];
  accumulate_row<V, 2>(n, threads, sums, [=](auto tag, int64_t i, auto* lanes) {
    using W = decltype(tag);
    const auto q = W::load(p + i);
    const auto v = F::template slope<W>(q);
    lanes[0] = W::add(lanes[0], v);
    lanes[1] = W::fma(v, W::load(g + i), lanes[1]);
  });
  const double mean = sums[0] == 0 ? 0 : sums[1] / sums[0];
  double none[1];
  const T center = (T)mean, scale = (T)(1.0 / temperature);
  accumulate_row<V, 1>(n, threads, none, [=](auto tag, int64_t i, auto*) {
    using W = decltype(tag);
    const auto q = W::load(p + i);
    const auto v = F::template slope<W>(q);
    W::store(dx + i, W::mul(W::mul(v, W::set(scale)), W::sub(W::load(g + i), W::set(center))));
  });
  return mean;
}

}  // namespace
