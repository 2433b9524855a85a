// Functions of the threshold of σ_k in float32 with the digits of float64: log σ_k, its derivative, that of τ, and the
// cross-entropy of k-hot targets.
//
// τ is the root of the balanced tails, summed in float64 by blocks: it is right to 1e-7 T. Margins are sums of two floats,
// so that e^{−|z|} is right to a few roundings however large |z| is. That needs a fused multiply-add; without one, and
// where numbers underflow, rows are left to float64.
#pragma once

#include "solve.h"

namespace {

#if defined(__AVX2__) || defined(KHOT_NEON)
constexpr bool kIsFused = true;
#else
constexpr bool kIsFused = false;
#endif

// e^{−|z|} and |z|, and whether z > 0.
template <class V> struct Fine {
  typename V::reg power, size;
  typename V::mask_t above;
};

// z = (x − anchor)/T − shift in twice the digits of a float.
struct FineMargin {
  float anchor, scale, scale_rest, shift, shift_rest;
  FineMargin(const Point<float>& point, double temperature)
      : anchor(point.anchor), scale((float)(1 / temperature)), scale_rest((float)(1 / temperature - (double)scale)),
        shift((float)point.shift), shift_rest((float)(point.shift - (double)shift)) {}

  template <class V> Fine<V> at(typename V::reg x) const {
    const auto a = V::set(anchor), by = V::set(scale), more = V::set(shift), zero = V::set(0);
    const auto d = V::sub(a, x), b = V::sub(d, a);  // a − x = d + d_rest exactly
    const auto d_rest = V::sub(V::sub(a, V::sub(d, b)), V::add(x, b));
    const auto p = V::mul(d, by), lost = V::fma(d, by, V::sub(zero, p));
    const auto p_rest = V::fma(d, V::set(scale_rest), V::fma(d_rest, by, lost));
    const auto high = V::add(p, more), c = V::sub(high, p);
    const auto high_rest = V::add(V::sub(p, V::sub(high, c)), V::sub(more, c));
    const auto sum = V::add(V::add(high_rest, p_rest), V::set(shift_rest));
    const auto low = V::blend(V::gt(V::abs(high), V::set(Limits<float>::largest)), zero, sum);  // NaN for NaN
    const auto above = V::gt(zero, high);  // −z = high + low
    const auto e = small_exp<V>(high);
    return {V::fma(e, V::blend(above, low, V::sub(zero, low)), e), V::abs(high), above};
  }
};

constexpr double kRootTolerance = 2e-4;  // of log(left/right): Newton's step from there errs by its square

// A sum of n numbers that is smaller may have lost some that underflow.
inline double faint(int64_t n) { return (double)Limits<float>::tiny * (double)n / (double)Limits<float>::eps; }

// `tails` with fine margins, and Newton's step. NaN if there is nothing to sum.
template <class V> Sides fine_sides(const Row<float>& row, const Point<float>& point) {
  double sums[5];
  const FineMargin margin(point, row.temperature);
  accumulate_scores<V, 5>(row, sums, [=](auto at, auto* lanes) {
    const auto f = margin.at<V>(at.scores(row));
    const auto one = V::set(1), large = V::div(one, V::add(one, f.power)), tail = V::mul(f.power, large);
    const auto upper = V::keep(f.above, tail), density = V::mul(tail, large);
    const auto upper_density = V::keep(f.above, density);
    lanes[0] = V::add(lanes[0], V::sub(tail, upper));
    lanes[1] = V::add(lanes[1], upper);
    lanes[2] = V::add(lanes[2], V::sub(density, upper_density));
    lanes[3] = V::add(lanes[3], upper_density);
    lanes[4] = V::add(lanes[4], V::keep(f.above, one));
  });
  const Sides sides({sums[0], sums[1], sums[2], sums[3], sums[4]}, sums[4] - row.k);
  const double least = faint(row.n);
  return sides.left > least && sides.right > least ? sides : Sides({}, 0);
}

// The threshold, from all scores of the row. False if it is infinite, or decided by numbers too small to be summed.
template <class V> bool find_root(const Row<float>& row, float* scratch, Point<float>* point) {
  constexpr double most = 1e30;  // of T, so that 1/T is a float
  double count, last = std::numeric_limits<double>::infinity();
  if (!(kIsFused && row.k > 0 && row.k < (double)row.n && row.temperature > 1 / most && row.temperature < most))
    return false;
  bool is_near = guess<V>(row, scratch, &count, point);
  for (int pass = 0; is_near && pass < 6; ++pass) {
    const Sides sides = fine_sides<V>(row, *point);
    is_near = std::fabs(sides.step) <= last / 2;  // false for NaN
    if (!is_near) break;
    last = std::fabs(sides.step);
    *point = point->moved(sides.step, row.temperature);
    if (std::fabs(sides.ratio) <= kRootTolerance) return true;
  }
  const Census census = count_kinds<V>(row);
  if (is_settled(row, census)) return false;
  const Balance found = locate<Logistic, V>(row, census, false, scratch, point);
  *point = point->moved(found.step, row.temperature);
  const Sides sides = fine_sides<V>(row, *point);
  *point = point->moved(sides.step, row.temperature);
  return found.is_root && std::fabs(sides.ratio) <= kRootTolerance;
}

// log(1 + e) for 0 ≤ e ≤ 1, as 2 artanh(e/(2 + e)).
template <class V> inline typename V::reg log_of_more(typename V::reg e) {
  const auto s = V::div(e, V::add(V::set(2), e)), q = V::mul(s, s);
  constexpr float c[] = {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2};
  return V::mul(s, polynomial<V>(c, q));
}

// log σ(z), and the threshold. False if the row is left to another method.
template <class V> bool log_row(const Row<float>& row, float* y, khot::Root* root) {
  Point<float> point;
  if (!find_root<V>(row, y, &point)) return false;
  *root = {(double)point.anchor, point.shift};
  double none[1];
  const FineMargin margin(point, row.temperature);
  accumulate_scores<V, 1>(row, none, [=](auto at, auto*) {
    const auto f = margin.at<V>(at.scores(row));
    const auto log = V::add(log_of_more<V>(f.power), V::blend(f.above, V::set(0), f.size));
    at.store(y, V::sub(V::set(0), log));
  });
  return true;
}

// The threshold alone; `scratch` has n places.
template <class V> bool root_row(const Row<float>& row, float* scratch, khot::Root* root) {
  Point<float> point;
  if (!find_root<V>(row, scratch, &point)) return false;
  *root = {(double)point.anchor, point.shift};
  return true;
}

// dx for the cotangent of log σ(z), or if g is null for that of τ, which is `mass`. With h = g(1 − p), or 0:
// dx = (h − v·Σh/Σv)/T. False if the v underflow.
template <class V>
bool log_pull_row(const Row<float>& row, const khot::Root& root, const float* g, double mass, float* dx) {
  const FineMargin margin({(float)root.anchor, root.shift}, row.temperature);
  const auto slope = [=](auto at, typename V::reg* h) {
    const auto f = margin.at<V>(at.scores(row)), one = V::set(1);
    const auto large = V::div(one, V::add(one, f.power)), tail = V::mul(f.power, large);
    if (g) {  // an entry that cannot be chosen has no derivative
      const auto rest = V::mul(V::blend(f.above, tail, large), at.load(g));
      *h = V::keep(V::ge(V::set(Limits<float>::largest), f.size), rest);
    }
    return V::mul(tail, large);
  };
  double sums[2];
  accumulate_scores<V, 2>(row, sums, [=](auto at, auto* lanes) {
    typename V::reg h = V::set(0);
    lanes[0] = V::add(lanes[0], at.live(slope(at, &h)));
    lanes[1] = V::add(lanes[1], at.live(h));
  });
  if (!(sums[0] > faint(row.n))) return false;
  const double mean = (g ? sums[1] : -mass * row.temperature) / sums[0];
  if (!(std::fabs(mean) <= (double)Limits<float>::largest)) return false;
  double none[1];
  const auto center = V::set((float)mean), scale = V::set((float)(1 / row.temperature));
  accumulate_scores<V, 1>(row, none, [=](auto at, auto*) {
    typename V::reg h = V::set(0);
    const auto v = slope(at, &h);
    at.store(dx, V::mul(V::fnma(v, center, h), scale));
  });
  return true;
}

// T·Σ KL(y ‖ σ(z)) for a target y of zeros and ones, of which k are ones, and its derivative σ(z) − y in x. dx is scratch
// space too. Infinity if the row is left to another method.
template <class V> double loss_row(Row<float> row, const float* y, float* dx) {
  constexpr double left = std::numeric_limits<double>::infinity();
  double counts[2];
  accumulate_row<V, 2>(row.n, row.threads, counts, [=](auto at, auto* lanes) {
    const auto target = at.load(y), one = V::set(1);
    lanes[0] = V::add(lanes[0], V::keep(target == one, one));
    lanes[1] = V::add(lanes[1], V::keep(target == V::set(0), one));
  });
  // Beyond the end of a row there are zeros.
  const int64_t padded = (row.n + V::width - 1) / V::width * V::width;
  if (counts[0] + counts[1] != (double)padded) return left;
  row.k = counts[0];
  Point<float> point;
  if (!find_root<V>(row, dx, &point)) return left;
  const FineMargin margin(point, row.temperature);
  double sums[2];
  accumulate_scores<V, 2>(row, sums, [=](auto at, auto* lanes) {
    const auto f = margin.at<V>(at.scores(row));
    const auto one = V::set(1), target = at.load(y), large = V::div(one, V::add(one, f.power));
    const auto is_one = V::gt(target, V::set(0)), is_wrong = is_one ^ f.above;
    const auto off = V::blend(is_wrong, large, V::mul(f.power, large));
    at.store(dx, V::blend(is_one, V::sub(V::set(0), off), off));
    lanes[0] = V::add(lanes[0], log_of_more<V>(f.power));
    lanes[1] = V::add(lanes[1], V::keep(is_wrong, f.size));
  });
  const double loss = sums[0] + sums[1];
  return loss > faint(row.n) ? row.temperature * loss : left;
}

}  // namespace
