// Rows of scores: top-k, hard and statistical, with costs, and the functions of their thresholds.
#pragma once

#include "fuzz.h"

namespace {

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

}  // namespace
