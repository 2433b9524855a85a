// Fuzzes the C entry points under the address and undefined-behaviour sanitizers: random sizes, ks, temperatures, masks
// and bit patterns. The sanitizers catch most; a case also fails
// - if a row that can be satisfied does not sum to k, if one that cannot is not NaN, or if an entry leaves [0, 1];
// - if the sums at a point are not those of the values there;
// - if a statistical top-k is not what exceeds its threshold;
// - if a row with costs does not spend its budget, alone or in a group;
// - if logarithms or losses are not those of a row that sums to k;
// - if a sample is not 0s and 1s of the right number;
// - if a sample along a tree, Pareto's constants or the characteristic function of a count is not what it stands for;
// - if a pursuit takes an atom twice or makes the residual larger;
// - if attention drops more than its bound, or bounds more than it may;
// - if a call that gets no memory does not say so.
// Usage: fuzz [cases] [seed]
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "khot.h"

// The library asks for memory with `new (std::nothrow)`: here it gets none while this is set.
static bool no_memory = false;
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return no_memory ? nullptr : std::malloc(size); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Rng = std::mt19937_64;

template <class T> constexpr int32_t dtype_of() { return sizeof(T) == 4 ? KHOT_FLOAT : KHOT_DOUBLE; }

template <class T> T any_bits(Rng& rng) {
  T v;
  const uint64_t bits = rng();
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

template <class T> void fill(Rng& rng, std::vector<T>& x) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int kind = (int)(rng() % 10);
  const double scale = std::pow(10, 8 * uniform(rng) - 4);
  for (auto& v : x) switch (kind) {
      case 0: v = any_bits<T>(rng); break;                                       // NaN, inf, denormals and all
      case 1: v = (T)(scale * std::tan(3.14159 * (uniform(rng) - 0.5))); break;  // heavy tails
      case 2: v = (T)std::floor(4 * uniform(rng)); break;                        // ties
      case 3: v = (T)scale; break;                                               // all equal
      case 4: v = uniform(rng) < 0.1 ? std::numeric_limits<T>::infinity() : (T)normal(rng); break;
      case 5: v = uniform(rng) < 0.5 ? -std::numeric_limits<T>::infinity() : (T)normal(rng); break;
      case 6: v = (T)(1000 + scale * normal(rng)); break;
      case 7: v = (T)(normal(rng) * std::numeric_limits<T>::min()); break;  // denormals
      case 8: v = uniform(rng) < 0.02 ? std::numeric_limits<T>::quiet_NaN() : (T)normal(rng); break;
      default: v = (T)(scale * normal(rng));
    }
}

// What the row must give: the sum, or NaN.
template <class T> double expected(const T* x, const uint8_t* mask, int64_t stride, int64_t n, double k, double t) {
  int64_t allowed = 0;
  bool nan = !(t > 0);
  for (int64_t i = 0; i < n; ++i) {
    if (mask && !mask[i * stride]) continue;
    nan |= std::isnan(x[i]);
    allowed += x[i] > -std::numeric_limits<T>::infinity();
  }
  return nan || !(k >= 0 && k <= (double)allowed) ? std::nan("") : k;
}

template <class T> int fuzz(Rng& rng, long number) {
  std::uniform_real_distribution<double> uniform;
  const int64_t n = 1 + (int64_t)(rng() % (number % 500 == 0 ? 100000 : number % 20 == 0 ? 2000 : 80));
  const int64_t rows = number % 500 == 0 ? 1 : 1 + (int64_t)(rng() % 20);
  const int64_t stride = rng() % 4 ? 1 : 3;
  std::vector<T> x((size_t)(rows * n)), p(x.size()), g(x.size(), (T)0.5), dx(x.size());
  std::vector<double> k((size_t)rows), t((size_t)rows), dk((size_t)rows);
  std::vector<uint8_t> mask;
  fill(rng, x);
  if (rng() % 3 == 0)
    for (int64_t i = 0; i < rows * n * stride; ++i) mask.push_back(rng() % 4 != 0);
  for (int64_t r = 0; r < rows; ++r) {
    const int kind = (int)(rng() % 8);
    k[(size_t)r] = kind == 0   ? any_bits<double>(rng)
                   : kind == 1 ? (double)(n + 1)
                   : kind < 5  ? std::floor((double)(n + 1) * uniform(rng))
                               : (double)n * uniform(rng);
    t[(size_t)r] = rng() % 50 == 0 ? std::nan("") : std::pow(10, 10 * uniform(rng) - 6);
  }
  const uint8_t* m = mask.empty() ? nullptr : mask.data();
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3),
             cdf = (int32_t)(rng() % 10) % (sizeof(T) == 4 ? KHOT_CDFS : KHOT_NORMAL);
  const bool is_shared = rng() % 4 == 0;  // one k and one T for all rows
  if (is_shared) {
    k.assign(k.size(), k[0]);
    t.assign(t.size(), t[0]);
  }
  const khot_rows scores = {x.data(),
                            rows,
                            n,
                            is_shared ? nullptr : k.data(),
                            1,
                            is_shared ? nullptr : t.data(),
                            1,
                            m,
                            n * stride,
                            stride,
                            k[0],
                            t[0],
                            dtype_of<T>(),
                            threads,
                            path,
                            cdf,
                            1 + 3 * uniform(rng)};
  khot_topk(&scores, p.data());
  if (sizeof(T) == 4 && number % 4 == 0) {  // any bits as scores of 16 bits: entries lie in [0, 1], or the row is NaN
    std::vector<uint16_t> h(x.size()), q(x.size()), dh(x.size()), level(x.size());
    std::vector<double> roots((size_t)(2 * rows));
    const bool is_any = rng() % 2;  // or bits of numbers between 1/2 and 2, of any sign
    for (auto& v : h) v = is_any ? (uint16_t)rng() : (uint16_t)(0x3800 | (rng() & 0x87ff));
    khot_rows halves = scores;
    halves.x = h.data();
    halves.dtype = rng() % 2 ? KHOT_HALF : KHOT_BFLOAT16;
    const uint16_t one = halves.dtype == KHOT_HALF ? 0x3c00 : 0x3f80, inf = halves.dtype == KHOT_HALF ? 0x7c00 : 0x7f80;
    no_memory = number % 40 == 0;
    for (auto& v : level) v = one;
    const auto status = no_memory ? KHOT_NO_MEMORY : KHOT_OK;
    const bool is_told = khot_half_topk(&halves, q.data(), rng() % 8 ? roots.data() : nullptr) == status;
    no_memory = false;
    khot_half_topk(&halves, q.data(), roots.data());
    no_memory = number % 40 == 0;
    if (!is_told || khot_half_pull(&halves, roots.data(), h.data(), dh.data()) != status)
      return std::printf("case %ld: 16 bits: a wrong status\n", number), 1;
    for (const uint16_t v : q)
      if (!no_memory && v > one && (v & 0x7fff) <= inf)
        return std::printf("case %ld: 16 bits: %04x is not in [0, 1]\n", number, v), 1;
    no_memory = false;
    // The gradient of a constant is none; that of a row of NaN is NaN. The slope of a Cauchy cdf may underflow, and T
    // as well.
    khot_half_pull(&halves, roots.data(), level.data(), dh.data());
    for (size_t i = 0; i < dh.size(); ++i) {
      const double heat = t[i / (size_t)n];
      const bool is_nan = (q[i] & 0x7fff) > inf;
      const uint16_t most = halves.dtype == KHOT_HALF ? 0x0100 : 0x3727;  // 1.5e-5 and 1e-5
      if (is_nan ? (dh[i] & 0x7fff) <= inf && heat > 0 : heat >= 1 && (dh[i] & 0x7fff) > most)
        return std::printf("case %ld: 16 bits: the gradient of a constant is %04x at T=%.17g, y is %04x\n", number,
                           dh[i], heat, q[i]),
               1;
    }
  }
  khot_rows solved = scores;
  solved.x = p.data();
  khot_topk_pull(&solved, g.data(), dx.data(), dk.data());
  std::vector<T> chosen(x.size()), z(x.size());
  std::vector<uint8_t> left((size_t)rows);
  khot_sigmoid_margin(&scores, z.data(), left.data());
  khot_hard_topk(&scores, chosen.data());
  std::vector<T> over(x.size());
  std::vector<double> theta((size_t)rows);
  const bool is_exact = rng() % 2;
  khot_statistical(&scores, rng() % 2 ? 0.0 : 0.1, is_exact, over.data(), theta.data());
  for (int64_t r = 0; r < rows; ++r) {
    int64_t more = 0, from = 0;  // scores above the threshold, and those that reach it
    for (int64_t i = 0; i < n; ++i) {
      more += (double)x[(size_t)(r * n + i)] > theta[(size_t)r];
      from += (double)x[(size_t)(r * n + i)] >= theta[(size_t)r];
      const auto above = (double)(T)(x[(size_t)(r * n + i)] - (T)theta[(size_t)r]);
      const auto y = (double)over[(size_t)(r * n + i)];
      if (std::isfinite(theta[(size_t)r]) && !(y >= 0 && (y > 0) <= (above > 0) && y <= std::fmax(above, 0) * 1.001))
        return std::printf("case %ld row %ld: statistical %.17g above %.17g\n", number, (long)r, y, above), 1;
    }
    const double rank = std::floor(k[(size_t)r]) + 1;
    if (is_exact && std::isfinite(theta[(size_t)r]) && !((double)more < rank && rank <= (double)from))
      return std::printf("case %ld row %ld: %.17g is not of rank %.17g\n", number, (long)r, theta[(size_t)r], rank), 1;
  }
  // Sums at a point are those of the values there: Σ F = N + lower − upper.
  std::vector<T> there(x.size());
  std::vector<double> anchor((size_t)rows), shift((size_t)rows), none((size_t)rows, 0.0), sums((size_t)(5 * rows));
  for (int64_t r = 0; r < rows; ++r) {
    anchor[(size_t)r] = rng() % 20 ? (double)x[(size_t)(r * n)] : any_bits<double>(rng);
    shift[(size_t)r] = rng() % 20 ? 4 * uniform(rng) - 2 : any_bits<double>(rng);
  }
  khot_sums_at(&scores, anchor.data(), shift.data(), sums.data());
  khot_value_at(&scores, anchor.data(), shift.data(), none.data(), there.data());
  for (int64_t r = 0; r < rows; ++r) {
    const double* s = &sums[(size_t)(5 * r)];
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double)there[(size_t)(r * n + i)];
    const bool is_any = !std::isfinite((T)shift[(size_t)r]) || std::isnan(sum);
    if (!is_any && !(std::fabs(s[0] + s[1] - s[2] - sum) <= 1e-6 * ((double)n + 1) && s[3] >= 0 && s[4] >= 0))
      return std::printf("case %ld row %ld: sums %.17g + %.17g − %.17g at a point, values %.17g\n", number, (long)r,
                         s[0], s[1], s[2], sum),
             1;
  }
  const double limit = sizeof(T) == 4 ? 1e-6 : 1e-9;
  for (int64_t r = 0; r < rows; ++r) {
    const double want =
        expected(x.data() + r * n, m ? m + r * n * stride : nullptr, stride, n, k[(size_t)r], t[(size_t)r]);
    const double whole = k[(size_t)r] == std::floor(k[(size_t)r]) && t[(size_t)r] > 0 ? want : std::nan("");
    double sum = 0, ones = 0, margins = 0, softest = 0;
    bool in_range = true;
    for (int64_t i = 0; i < n; ++i) {
      const double v = (double)p[(size_t)(r * n + i)];
      sum += v;
      softest = std::fmax(softest, std::fmin(v, 1 - v));
      in_range &= v >= 0 && v <= 1;
      ones += (double)chosen[(size_t)(r * n + i)];
      margins += 1 / (1 + std::exp(-(double)z[(size_t)(r * n + i)]));
    }
    // The gradient of a constant is none, and its weighted mean is the constant; 0 in a saturated row.
    const double mean = dk[(size_t)r];
    // Below, a float is denormal; and the slope of a Cauchy cdf is π times the square of its tail, denormal below
    // 6e-20.
    const bool has_digits = want > 1e-30 && (cdf != KHOT_CAUCHY || softest > 1e-18);
    bool is_flat = !has_digits || std::fabs(mean - 0.5) <= 1e-5 || mean == 0;
    for (int64_t i = 0; i < n; ++i)
      is_flat &= !has_digits || std::fabs((double)dx[(size_t)(r * n + i)]) * t[(size_t)r] <= 1e-5;
    const bool is_hard = std::isnan(whole) ? std::isnan(ones) || std::isnan(t[(size_t)r]) : ones == whole;
    const bool is_margin = left[(size_t)r] || std::fabs(margins - want) <= limit * std::fmax(want, 1);
    const bool good =
        is_flat && is_hard && is_margin &&
        (std::isnan(want) ? std::isnan(sum) : in_range && std::fabs(sum - want) <= limit * std::fmax(want, 1));
    if (!good) {
      std::printf(
          "case %ld row %ld of %ld: n=%ld k=%.17g T=%.17g path=%d cdf=%d %s: sum %.17g, expected %.17g; hard sum "
          "%.17g, of margins %.17g\n",
          number, (long)r, (long)rows, (long)n, k[(size_t)r], t[(size_t)r], path, cdf,
          sizeof(T) == 4 ? "float" : "double", sum, want, ones, margins);
      for (int64_t i = 0; i < n && i < 40; ++i)
        std::printf(m && !m[(r * n + i) * stride] ? "(%.9g) " : "%.9g ", (double)x[(size_t)(r * n + i)]);
      std::printf("\n");
      return 1;
    }
  }
  return 0;
}

// With costs: rows that are solved spend their budget, and a cotangent that is the costs, which moves the budget alone,
// has no derivative, whatever g is at a masked score. Rows without a clear finite threshold are left. Short
// rows come alone and in groups.
template <class T> int fuzz_costs(Rng& rng, long number) {
  std::uniform_real_distribution<double> uniform;
  const int64_t n = 1 + (int64_t)(rng() % (number % 500 == 0 ? 100000 : number % 20 == 0 ? 2000 : 80));
  const int64_t rows = number % 500 == 0 ? 1 : 1 + (int64_t)(rng() % (rng() % 2 ? 40 : 4)), stride = rng() % 4 ? 1 : 3;
  const bool is_shared = rng() % 2, is_any = rng() % 8 == 0;
  std::vector<T> x((size_t)(rows * n)), c((size_t)(is_shared ? n : rows * n)), y(x.size()), z(x.size()), dx(x.size()),
      g(x.size());
  std::vector<double> k((size_t)rows), dk((size_t)rows), heat((size_t)rows);
  std::vector<uint8_t> mask, left((size_t)rows), unsolved((size_t)rows);
  fill(rng, x);
  const bool is_warm = rng() % 2;  // one temperature for all rows, or any
  const double spread = rng() % 8 ? 4 * uniform(rng) : 12, size = rng() % 8 ? 1 : std::pow(10, 40 * uniform(rng) - 20);
  for (int64_t r = 0; r < rows; ++r) {
    const double any = any_bits<double>(rng);
    const double t = rng() % 50                               ? std::pow(10, 10 * uniform(rng) - 6)
                     : any > 1e30 || (any > 0 && any < 1e-30) ? 1e30
                                                              : any;
    heat[(size_t)r] = is_warm && r > 0 ? heat[0] : t;
  }
  for (auto& v : c)
    v = is_any && rng() % 50 == 0 ? any_bits<T>(rng) : (T)(size * std::pow(10, spread * (uniform(rng) - 0.5)));
  if (rng() % 3 == 0)
    for (int64_t i = 0; i < rows * n * stride; ++i) mask.push_back(rng() % 4 != 0);
  const auto cost = [&](int64_t r, int64_t i) { return (double)c[(size_t)(is_shared ? i : r * n + i)]; };
  const auto may = [&](int64_t r, int64_t i) { return mask.empty() || mask[(size_t)((r * n + i) * stride)]; };
  for (int64_t r = 0; r < rows; ++r) {
    double all = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (may(r, i)) all += cost(r, i);
      g[(size_t)(r * n + i)] = may(r, i) ? (T)cost(r, i) : any_bits<T>(rng);
    }
    const double share = std::pow(uniform(rng), 3);
    k[(size_t)r] = rng() % 10 ? all * (rng() % 4 ? share : 1 - share) : any_bits<double>(rng);
  }
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3),
             cdf = (int32_t)(rng() % (sizeof(T) == 4 ? KHOT_CDFS : KHOT_NORMAL));
  khot_rows asked = {x.data(),
                     rows,
                     n,
                     k.data(),
                     1,
                     heat.data(),
                     1,
                     mask.empty() ? nullptr : mask.data(),
                     n * stride,
                     stride,
                     0,
                     1,
                     dtype_of<T>(),
                     threads,
                     path,
                     cdf,
                     1 + 3 * uniform(rng),
                     c.data(),
                     is_shared ? 0 : n};
  khot_cost_topk(&asked, 0, y.data(), left.data());
  khot_cost_topk(&asked, 1, z.data(), unsolved.data());
  khot_rows solved = asked;
  solved.x = y.data();
  khot_topk_pull(&solved, g.data(), dx.data(), dk.data());
  for (int64_t r = 0; r < rows; ++r) {
    const double t = heat[(size_t)r];
    double paid = 0, forced = 0, free = 0, most = 0, softest = 0, by_margins = 0, widest = 0, least = INFINITY;
    bool is_bad = !(t > 0), in_range = true, is_flat = true;
    for (int64_t i = 0; i < n; ++i) {
      const auto at = (size_t)(r * n + i);
      if (may(r, i)) {
        const T per_cost = x[at] / (T)cost(r, i);
        is_bad |= std::isnan(x[at]) || !(cost(r, i) > 0 && std::isfinite(cost(r, i)));
        if (std::isfinite(per_cost)) free += cost(r, i), widest = std::fmax(widest, std::fabs((double)per_cost));
        if (per_cost > 0 && std::isinf(per_cost)) forced += cost(r, i);
        paid += cost(r, i) * (double)y[at];
        by_margins += cost(r, i) / (1 + std::exp(-(double)z[at]));
        most = std::fmax(most, cost(r, i));
        least = std::fmin(least, cost(r, i));
        softest = std::fmax(softest, std::fmin((double)y[at], 1 - (double)y[at]));
      } else {
        in_range &= left[(size_t)r] || y[at] == 0;
      }
      in_range &= left[(size_t)r] || (y[at] >= 0 && y[at] <= 1);
    }
    const double rest = k[(size_t)r] - forced;
    // Kinks between scores that far apart, or beside a budget or costs that small, may take too many steps.
    const bool is_even = most < 1e8 * least, is_tame = is_even && widest < 1e8 && rest > 1e-6,
               is_within = rest > 1e-5 * forced && rest < (1 - 1e-5) * free;
    const bool is_clear = !is_bad && is_tame && is_within;
    const bool must_be_left = is_bad || !(rest > 0 && rest < free);
    const double limit = (sizeof(T) == 4 ? 1e-6 : 1e-9) * std::fmax(k[(size_t)r], 1) + 1e-30 * most;
    const bool has_digits = is_even && softest > (cdf == KHOT_CAUCHY ? 1e-12 : 1e-25);  // else the slopes underflow
    for (int64_t i = 0; i < n && !left[(size_t)r] && has_digits; ++i)
      is_flat &= !may(r, i) || std::fabs((double)dx[(size_t)(r * n + i)]) * t <= 1e-5;
    if (has_digits && !left[(size_t)r]) is_flat &= dk[(size_t)r] == 0 || std::fabs(dk[(size_t)r] - 1) <= 1e-5;
    const bool is_paid = std::fabs(paid - k[(size_t)r]) <= limit;
    // Margins of scores that span more than the range of a float in T round.
    const bool is_margin = unsolved[(size_t)r] || !(widest < 1e30 * t) || cdf != KHOT_SIGMOID ||
                           std::fabs(by_margins - k[(size_t)r]) <= 4 * limit;  // σ(z) has |z| roundings
    if (!is_margin || !(left[(size_t)r] ? !is_clear : !must_be_left && in_range && is_flat && is_paid))
      return std::printf(
                 "case %ld row %ld: n=%ld k=%.17g T=%.17g path=%d cdf=%d %s: left %d, paid %.17g, by margins %.17g, "
                 "range %d, flat %d, must %d\n",
                 number, (long)r, (long)n, k[(size_t)r], t, path, cdf, sizeof(T) == 4 ? "float" : "double",
                 left[(size_t)r], paid, by_margins, in_range, is_flat, must_be_left),
             1;
  }
  return 0;
}

// Functions of the threshold, of floats: σ_k of the logarithm sums to k, and so does that of the loss's derivative and
// its target; derivatives in a shift of all scores are none. Only rows of finite thresholds may be solved.
int fuzz_logs(Rng& rng, long number) {
  std::uniform_real_distribution<double> uniform;
  const int64_t n = 1 + (int64_t)(rng() % (number % 500 == 0 ? 100000 : number % 20 == 0 ? 2000 : 80));
  const int64_t rows = number % 500 == 0 ? 1 : 1 + (int64_t)(rng() % 8);
  std::vector<float> x((size_t)(rows * n)), y(x.size()), scratch(x.size()), g(x.size(), 1.0f), dx(x.size());
  std::vector<float> target(x.size()), slope(x.size());
  std::vector<double> k((size_t)rows), anchor(k.size()), shift(k.size()), again(k.size()), mass(k.size(), 1.0),
      loss(k.size());
  std::vector<uint8_t> mask, left(k.size()), same(k.size()), faint(k.size()), flat(k.size()), wrong(k.size());
  fill(rng, x);
  const double share = uniform(rng), t = rng() % 50 ? std::pow(10, 10 * uniform(rng) - 6) : any_bits<double>(rng);
  for (auto& v : target) v = rng() % 2000 ? (float)(uniform(rng) < share) : any_bits<float>(rng);
  for (auto& v : k) v = rng() % 8 ? (double)n * uniform(rng) : std::floor((double)(n + 1) * uniform(rng));
  if (rng() % 3 == 0)
    for (int64_t i = 0; i < rows * n; ++i) mask.push_back(rng() % 4 != 0);
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3);
  const khot_rows asked = {x.data(), rows, n, k.data(), 1,          nullptr, 0,    mask.empty() ? nullptr : mask.data(),
                           n,        1,    0, t,        KHOT_FLOAT, threads, path, KHOT_SIGMOID,
                           0};
  khot_log_sigmoid(&asked, y.data(), nullptr, anchor.data(), shift.data(), left.data());
  khot_log_sigmoid(&asked, nullptr, scratch.data(), anchor.data(), again.data(), same.data());
  khot_log_sigmoid_pull(&asked, anchor.data(), shift.data(), g.data(), nullptr, dx.data(), faint.data());
  khot_log_sigmoid_pull(&asked, anchor.data(), shift.data(), nullptr, mass.data(), scratch.data(), flat.data());
  khot_cross_entropy(&asked, target.data(), loss.data(), slope.data(), wrong.data());
  for (int64_t r = 0; r < rows; ++r) {
    const auto i = (size_t)r;
    const double want = expected(&x[(size_t)(r * n)], mask.empty() ? nullptr : &mask[(size_t)(r * n)], 1, n, k[i], t);
    double sum = 0, ones = 0, slopes = 0, most = 0, pulled = 0, all = 0, largest = 0;
    for (int64_t j = r * n; j < (r + 1) * n; ++j) {
      sum += std::exp((double)y[(size_t)j]);
      ones += (double)target[(size_t)j];
      slopes += (double)slope[(size_t)j];
      most = std::fmax(most, std::fabs((double)slope[(size_t)j]));
      pulled += (double)dx[(size_t)j];
      largest = std::fmax(largest, std::fabs((double)dx[(size_t)j]));
      all += (double)scratch[(size_t)j];
    }
    const double near = 1e-6 * std::fmax(k[i], 1), few = 1e-5 * std::fmax(1 / t, largest) * (double)n;
    bool good = left[i] == same[i] && (left[i] || (shift[i] == again[i] && std::fabs(sum - want) <= near));
    good &= left[i] || faint[i] || std::fabs(pulled) <= few;
    good &= left[i] || flat[i] || std::fabs(all - 1) <= 1e-5;
    good &= wrong[i] || (loss[i] > 0 && most <= 1 && std::fabs(slopes) <= 1e-6 * std::fmax(ones, 1));
    if (!good)
      return std::printf(
                 "case %ld row %ld: n=%ld k=%.17g T=%.17g path=%d: logarithms of %.17g, pulled %.17g, %.17g; loss "
                 "%.17g, slopes %.17g\n",
                 number, (long)r, (long)n, k[i], t, path, sum, pulled, all, loss[i], slopes),
             1;
  }
  return 0;
}

// Samples have 0s and 1s, as many as their probabilities sum to, rounded up or down; an item at 0 none, at 1 always.
template <class T> int fuzz_samples(Rng& rng, long number) {
  std::uniform_real_distribution<double> uniform;
  const int64_t n = 1 + (int64_t)(rng() % (number % 500 == 0 ? 100000 : number % 20 == 0 ? 20000 : 80));
  const int64_t rows = number % 20 == 0 ? 1 : 1 + (int64_t)(rng() % 5), draws = 1 + (int64_t)(rng() % 3);
  const double steep = 20 * uniform(rng);
  std::vector<T> p((size_t)(rows * n)), x((size_t)(draws * rows * n));
  std::vector<double> k((size_t)rows, 0.0);
  std::vector<uint8_t> whole((size_t)rows, 0);
  std::vector<int64_t> order((size_t)(rows * n));
  const bool is_any = rng() % 20 == 0;  // then the sanitizers alone look on
  for (int64_t i = 0; i < rows * n; ++i) {
    p[(size_t)i] = is_any ? any_bits<T>(rng) : rng() % 8 == 0 ? (T)(rng() % 2) : (T)std::pow(uniform(rng), steep);
    k[(size_t)(i / n)] += (double)p[(size_t)i];
    order[(size_t)i] = i % n;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = n - 1; i > 0; --i)
      std::swap(order[(size_t)(r * n + i)], order[(size_t)(r * n) + rng() % (uint64_t)(i + 1)]);
  const int way = (int)(rng() % 4);
  const auto threads = 1 + (int32_t)(rng() % 2), is_paired = (int32_t)(rng() % 2);
  const khot_draws asked = {p.data(), rows, n, (int64_t)rng(), draws, is_paired, dtype_of<T>(), threads};
  if (way < 3)
    khot_pivotal(&asked, whole.data(), way == 1 ? order.data() : nullptr, n, way == 2, x.data());
  else
    khot_systematic(&asked, k.data(), x.data());
  // A random order has each item once.
  std::vector<int64_t> keys((size_t)rows), places((size_t)(rows * n));
  for (auto& key : keys) key = (int64_t)rng();
  khot_order(keys.data(), rows, n, threads, places.data());
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<bool> seen((size_t)n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = places[(size_t)(r * n + i)];
      if (place < 0 || place >= n || seen[(size_t)place])
        return std::printf("case %ld: n=%ld: not an order\n", number, (long)n), 1;
      seen[(size_t)place] = true;
    }
  }
  if (is_any) return 0;
  for (int64_t r = 0; r < draws * rows; ++r) {
    double sum = 0;
    bool good = true;
    for (int64_t i = 0; i < n; ++i) {
      const double v = (double)x[(size_t)(r * n + i)], q = (double)p[(size_t)(r % rows * n + i)];
      sum += v;
      good &= (v == 0 || v == 1) && (q > 0 || v == 0) && (q < 1 || v == 1);
    }
    if (good && std::fabs(sum - k[(size_t)(r % rows)]) < 1 + 1e-9 * k[(size_t)(r % rows)]) continue;
    std::printf("case %ld row %ld: n=%ld way=%d: sum %.17g, expected about %.17g\n", number, (long)r, (long)n, way, sum,
                k[(size_t)(r % rows)]);
    return 1;
  }
  return 0;
}

// A pursuit takes at most as many atoms as it may, different ones, and leaves a smaller residual than it began with.
template <class T> int fuzz_pursuit(Rng& rng, long number) {
  std::normal_distribution<double> normal;
  const int64_t n = 1 + (int64_t)(rng() % (number % 20 == 0 ? 300 : 40)), rows = 1 + (int64_t)(rng() % 70);
  const int64_t d = 1 + (int64_t)(rng() % 8), slots = 1 + (int64_t)(rng() % (uint64_t)(n < 10 ? n : 10));
  const bool is_any = rng() % 10 == 0;  // then the sanitizers alone look on
  const auto at = [](int64_t i, int64_t j, int64_t width) { return (size_t)(i * width + j); };
  std::vector<double> atoms((size_t)(n * d)), x((size_t)(rows * d));
  for (auto& v : atoms) v = rng() % 4 ? normal(rng) : std::floor(2 * normal(rng));  // some are alike, or 0
  for (auto& v : x) v = normal(rng);
  std::vector<T> gram((size_t)(n * n)), alpha((size_t)(rows * n)), coefs((size_t)(rows * slots), (T)0);
  std::vector<double> square((size_t)rows, 0.0), noise((size_t)rows);
  std::vector<int64_t> counts((size_t)rows), chosen((size_t)(rows * slots), 0), taken((size_t)rows, 0);
  std::vector<uint8_t> close((size_t)rows, 0);
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += a[i] * b[i];
    return sum;
  };
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      gram[at(i, j, n)] = is_any ? any_bits<T>(rng) : (T)dot(&atoms[at(i, 0, d)], &atoms[at(j, 0, d)]);
  for (int64_t r = 0; r < rows; ++r) {
    counts[(size_t)r] = (int64_t)(rng() % (uint64_t)(slots + 1));
    square[(size_t)r] = dot(&x[at(r, 0, d)], &x[at(r, 0, d)]);
    noise[(size_t)r] = (sizeof(T) == 4 ? 6e-11 : 2e-28) * square[(size_t)r];
    for (int64_t j = 0; j < n; ++j)
      alpha[at(r, j, n)] = is_any ? any_bits<T>(rng) : (T)dot(&x[at(r, 0, d)], &atoms[at(j, 0, d)]);
  }
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3);
  const khot_signals asked = {gram.data(),  rows,          n,       slots, counts.data(), square.data(), noise.data(),
                              noise.data(), dtype_of<T>(), threads, path};
  const auto pursue = [&] {
    return khot_pursue(&asked, alpha.data(), chosen.data(), coefs.data(), taken.data(), close.data());
  };
  no_memory = number % 50 == 0;
  if (no_memory && pursue() != KHOT_NO_MEMORY) {
    std::printf("case %ld: a pursuit without memory does not say so\n", number);
    return 1;
  }
  no_memory = false;
  bool good = pursue() == KHOT_OK;
  for (int64_t r = 0; r < rows && !is_any; ++r) {
    std::vector<double> left(&x[at(r, 0, d)], &x[at(r, 0, d)] + d);
    good &= taken[(size_t)r] <= counts[(size_t)r];
    for (int64_t t = 0; t < taken[(size_t)r]; ++t) {
      const int64_t j = chosen[at(r, t, slots)];
      good &= j >= 0 && j < n;
      for (int64_t u = 0; u < t; ++u) good &= chosen[at(r, u, slots)] != j;
      for (int64_t i = 0; good && i < d; ++i) left[(size_t)i] -= (double)coefs[at(r, t, slots)] * atoms[at(j, i, d)];
    }
    // Alike atoms lose digits: those rows are solved once more by the caller.
    good &= close[(size_t)r] || dot(left.data(), left.data()) <= square[(size_t)r] * (1 + 1e-4);
  }
  if (!good) std::printf("case %ld: a bad pursuit; n=%ld d=%ld slots=%ld\n", number, (long)n, (long)d, (long)slots);
  return !good;
}

// What the head of a query leaves is within its bound, and that within ε; a refused query has all its keys.
template <class T> int fuzz_attention(Rng& rng, long number) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int64_t heads = 1 + (int64_t)(rng() % 3), rows = 1 + (int64_t)(rng() % 4), d = 1 + (int64_t)(rng() % 40);
  const int64_t used = 1 + (int64_t)(rng() % 12), size = 1 + (int64_t)(rng() % 9), room = used + (int64_t)(rng() % 3);
  const int64_t e = 1 + (int64_t)(rng() % 9), limit = (int64_t)(rng() % (uint64_t)(used + 1));
  const int64_t bounded = used - (int64_t)(rng() % 2);
  std::vector<int64_t> index((size_t)(heads * room * size), -1), counts((size_t)(heads * room), 0);
  int64_t n = 0;
  for (int64_t i = 0; i < used * size; ++i) {
    if (i > 0 && rng() % 5 == 0) continue;
    for (int64_t b = 0; b < heads; ++b) {
      index[(size_t)(b * room * size + i)] = n;
      ++counts[(size_t)(b * room + i / size)];
    }
    ++n;
  }
  const bool is_any = rng() % 8 == 0;  // then the sanitizers alone look on
  const double length = std::pow(10, 4 * uniform(rng) - 2), near = std::pow(10, 3 * uniform(rng) - 3);
  const auto cells = (size_t)(heads * room);
  std::vector<T> q((size_t)(heads * rows * d)), keys(cells * (size_t)(size * d)), centre(cells * (size_t)d, (T)0);
  std::vector<T> radius(cells, (T)0), share(cells, (T)1), values((size_t)(heads * n * e)),
      out((size_t)(heads * rows * e));
  for (auto& v : q) v = is_any ? any_bits<T>(rng) : (T)(length * normal(rng));
  for (auto& v : values) v = (T)normal(rng);
  double largest = 0;
  for (size_t c = 0; c < cells; ++c) {
    std::vector<double> middle((size_t)d);
    for (auto& v : middle) v = normal(rng);
    for (int64_t i = 0; i < size; ++i) {
      double square = 0;
      for (int64_t j = 0; j < d; ++j) {
        T& v = keys[(c * (size_t)size + (size_t)i) * (size_t)d + (size_t)j];
        v = is_any ? any_bits<T>(rng) : (T)(middle[(size_t)j] + near * normal(rng));
        square += (double)v * (double)v;
        if (index[c * (size_t)size + (size_t)i] >= 0) centre[c * (size_t)d + (size_t)j] += v / (T)counts[c];
      }
      largest = std::fmax(largest, std::sqrt(square));
    }
    for (int64_t i = 0; i < size; ++i) {
      double square = 0;
      for (int64_t j = 0; j < d; ++j) {
        const double apart = (double)keys[(c * (size_t)size + (size_t)i) * (size_t)d + (size_t)j] -
                             (double)centre[c * (size_t)d + (size_t)j];
        square += apart * apart;
      }
      if (index[c * (size_t)size + (size_t)i] >= 0) radius[c] = std::fmax(radius[c], (T)(std::sqrt(square) * 1.0001));
    }
  }
  std::vector<uint8_t> mask, refused((size_t)(heads * rows)), head((size_t)(heads * rows * n), 0);
  if (rng() % 2)
    for (int64_t i = 0; i < heads * rows * n; ++i) mask.push_back(rng() % 4 != 0);
  std::vector<double> epsilon(refused.size()), bound(refused.size());
  std::vector<int64_t> k(refused.size()), scored(refused.size());
  for (auto& v : epsilon) v = std::pow(10, -5 * uniform(rng)) * 0.9;
  const std::vector<T> longest((size_t)heads, (T)(largest * 1.0001));
  const double slack = (double)(d + 8 + size) * (double)std::numeric_limits<T>::epsilon();
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3);
  const khot_cells asked = {q.data(),
                            keys.data(),
                            centre.data(),
                            radius.data(),
                            share.data(),
                            index.data(),
                            counts.data(),
                            values.data(),
                            mask.empty() ? nullptr : mask.data(),
                            epsilon.data(),
                            longest.data(),
                            slack,
                            heads,
                            rows,
                            d,
                            room,
                            used,
                            bounded,
                            size,
                            n,
                            e,
                            n * e,
                            e,
                            limit,
                            dtype_of<T>(),
                            threads,
                            path};
  const auto attend = [&] {
    return khot_attend(&asked, out.data(), k.data(), bound.data(), scored.data(), refused.data(), head.data());
  };
  no_memory = number % 50 == 0;
  if (no_memory && attend() != KHOT_NO_MEMORY) {
    std::printf("case %ld: attention without memory does not say so\n", number);
    return 1;
  }
  no_memory = false;
  bool good = attend() == KHOT_OK;
  for (size_t r = 0; r < refused.size() && !is_any; ++r) {
    const size_t b = r / (size_t)rows;
    std::vector<double> score((size_t)n, -std::numeric_limits<double>::infinity());
    double top = score[0], kept = 0, lost = 0;
    int64_t ones = 0, all = 0;
    for (size_t i = 0; i < (size_t)(used * size); ++i) {
      const int64_t at = index[b * (size_t)(room * size) + i];
      if (at < 0 || (!mask.empty() && !mask[r * (size_t)n + (size_t)at])) continue;
      double sum = 0;
      for (size_t j = 0; j < (size_t)d; ++j)
        sum += (double)q[r * (size_t)d + j] * (double)keys[(b * (size_t)(room * size) + i) * (size_t)d + j];
      score[(size_t)at] = sum;
      top = std::fmax(top, sum);
      ++all;
    }
    for (size_t i = 0; i < (size_t)n && all; ++i) {
      const bool is_head = head[r * (size_t)n + i];
      ones += is_head;
      (is_head ? kept : lost) += std::exp(score[i] - top);
    }
    good &= ones == k[r] && k[r] <= scored[r] && scored[r] <= all && bound[r] <= epsilon[r];
    good &= !all || lost <= bound[r] * (kept + lost) * (1 + 1e-12);
    good &= !refused[r] || (k[r] == all && bound[r] == 0);
    for (size_t j = 0; j < (size_t)e; ++j) good &= std::isfinite(out[r * (size_t)e + j]);
  }
  if (!good) std::printf("case %ld: bad attention; n=%ld d=%ld used=%ld\n", number, (long)n, (long)d, (long)used);
  return !good;
}

// Samples along a tree of counts are 0s and 1s, k in number; Pareto's constants fall as logits rise; and characteristic
// functions are the products and sums that they stand for.
int fuzz_laws(Rng& rng, long number) {
  std::uniform_real_distribution<double> uniform;
  const int64_t n = 1 + (int64_t)(rng() % (number % 500 == 0 ? 100000 : number % 20 == 0 ? 3000 : 200));
  const int64_t rows = number % 500 == 0 ? 1 : 1 + (int64_t)(rng() % 12), draws = 1 + (int64_t)(rng() % 5);
  const double steep = 20 * uniform(rng), scale = std::pow(10, 4 * uniform(rng) - 2);
  const bool is_any = rng() % 20 == 0;  // then the sanitizers alone look on
  const auto at = [n](int64_t r, int64_t i) { return (size_t)(r * n + i); };
  std::vector<double> p((size_t)(rows * n)), theta(p.size()), c(p.size()), k((size_t)rows), size((size_t)rows);
  std::vector<double> x((size_t)(draws * rows * n));
  std::vector<bool> is_tilted((size_t)rows);
  for (int64_t r = 0; r < rows; ++r) {
    double ones = 0, most = 0, odds = 0;
    for (int64_t i = 0; i < n; ++i) {
      double& chance = p[at(r, i)];
      double& logit = theta[at(r, i)];
      chance = is_any ? any_bits<double>(rng) : rng() % 8 == 0 ? (double)(rng() % 2) : std::pow(uniform(rng), steep);
      logit = is_any ? any_bits<double>(rng) : scale * std::tan(3.1 * (uniform(rng) - 0.5));
      if (!is_any && rng() % 8 == 0) logit = (rng() % 2 ? 1 : -1) * std::numeric_limits<double>::infinity();
      ones += chance == 1;
      most += chance > 0;
      odds += 1 / (1 + std::exp(-logit));
    }
    k[(size_t)r] = is_any ? any_bits<double>(rng) : ones + std::floor((most - ones + 1) * uniform(rng));
    is_tilted[(size_t)r] = rng() % 4 != 0;  // otherwise the integrand may overflow
    size[(size_t)r] = is_any ? any_bits<double>(rng) : is_tilted[(size_t)r] ? odds : (double)(rng() % (uint64_t)(n + 1));
  }
  const auto threads = 1 + (int32_t)(rng() % 2), path = (int32_t)(rng() % 3);
  const auto group = 1 + (int64_t)(rng() % 3), seed = (int64_t)rng();
  const auto sample = [&] {
    return khot_sample_tree(p.data(), rows, n, k.data(), seed, 8, draws, group, path, threads, x.data());
  };
  no_memory = number % 50 == 0;
  if (no_memory && sample() != KHOT_NO_MEMORY)
    return std::printf("case %ld: a tree without memory does not say so\n", number), 1;
  no_memory = false;
  bool good = sample() == KHOT_OK;
  for (int64_t r = 0; r < draws * rows && !is_any; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double v = x[at(r, i)], chance = p[at(r % rows, i)];
      sum += v;
      good &= (v == 0 || v == 1) && (chance > 0 || v == 0) && (chance < 1 || v == 1);
    }
    good &= sum == k[(size_t)(r % rows)];
  }
  if (!good) return std::printf("case %ld: n=%ld: a bad sample along a tree\n", number, (long)n), 1;

  std::vector<uint8_t> left((size_t)rows);
  khot_pareto_constants(theta.data(), rows, n, size.data(), path, threads, c.data(), left.data());
  for (int64_t r = 0; r < rows && !is_any; ++r) {
    if (left[(size_t)r] || !is_tilted[(size_t)r]) continue;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = (int64_t)(rng() % (uint64_t)n);
      const double a = theta[at(r, i)], b = theta[at(r, j)], ca = c[at(r, i)], cb = c[at(r, j)];
      if (!(std::isfinite(a) ? ca > 0 : ca == 0))
        return std::printf("case %ld: n=%ld: the constant of %.17g is %.17g\n", number, (long)n, a, ca), 1;
      if (std::isfinite(a) && std::isfinite(b) && a < b && !(ca >= cb * (1 - 1e-10)))
        return std::printf("case %ld: n=%ld: the constants of %.17g and %.17g are %.17g and %.17g\n", number, (long)n, a,
                           b, ca, cb), 1;
    }
  }

  constexpr int most_points = 30;
  const int points = 1 + (int)(rng() % most_points);
  std::vector<double> step((size_t)(2 * rows * points)), weight(step.size()), product(step.size()), less(p.size()),
      same(p.size()), matters((size_t)(rows * points));
  for (auto& v : weight) v = is_any ? any_bits<double>(rng) : uniform(rng) - 0.5;
  for (int64_t t = 0; t < rows * points; ++t) {
    const double angle = 3.1 * (double)(t % points) / points;
    step[(size_t)(2 * t)] = std::cos(angle) - 1;
    step[(size_t)(2 * t + 1)] = std::sin(angle);
    matters[(size_t)t] = rng() % 4 ? 1 : 0;
  }
  khot_count_products(p.data(), rows, n, step.data(), matters.data(), points, path, threads, product.data());
  khot_count_rests(p.data(), rows, n, step.data(), weight.data(), points, path, threads, same.data(), less.data());
  for (int64_t t = 0; t < rows * points && !is_any; ++t) {
    const int64_t r = t / points;
    const std::complex<double> turn(step[(size_t)(2 * t)], step[(size_t)(2 * t + 1)]);
    std::complex<double> expected = 1;
    for (int64_t i = 0; i < n && matters[(size_t)t] != 0; ++i) expected *= 1.0 + p[at(r, i)] * turn;
    good &= std::abs(expected - std::complex<double>(product[(size_t)(2 * t)], product[(size_t)(2 * t + 1)])) < 1e-9;
  }
  for (int64_t r = 0; r < rows && !is_any; ++r) {
    const auto i = (int64_t)(rng() % (uint64_t)n);
    double sums[3] = {0, 0, 0};
    for (int64_t t = r * points; t < (r + 1) * points; ++t) {
      const std::complex<double> turn(step[(size_t)(2 * t)], step[(size_t)(2 * t + 1)]);
      const auto term =
          std::complex<double>(weight[(size_t)(2 * t)], weight[(size_t)(2 * t + 1)]) / (1.0 + p[at(r, i)] * turn);
      sums[0] += term.real();
      sums[1] += (term * (1.0 + turn)).real();
      sums[2] += std::abs(term);
    }
    good &= std::fabs(sums[0] - same[at(r, i)]) <= 1e-12 * sums[2] && std::fabs(sums[1] - less[at(r, i)]) <= 1e-12 * sums[2];
  }
  if (!good) std::printf("case %ld: n=%ld: a bad characteristic function\n", number, (long)n);
  return !good;
}

}  // namespace

int main(int argc, char** argv) {
  const long cases = argc > 1 ? std::atol(argv[1]) : 100000;
  Rng rng(argc > 2 ? (uint64_t)std::atoll(argv[2]) : 0);
  int failed = 0;
  for (long i = 0; i < cases && failed < 10; ++i) failed += i % 3 ? fuzz<float>(rng, i) : fuzz<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i) failed += fuzz_logs(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 3 ? fuzz_costs<float>(rng, i) : fuzz_costs<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_samples<float>(rng, i) : fuzz_samples<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i) failed += fuzz_laws(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_pursuit<float>(rng, i) : fuzz_pursuit<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_attention<float>(rng, i) : fuzz_attention<double>(rng, i);
  std::printf("%ld cases, %d failed\n", cases, failed);
  return failed != 0;
}
