// The constants of Pareto's law.
//
// An item has q = min(p, 1 − p), stored with a minus where p > ½, so that nothing is lost next to 0 and 1.
#pragma once

#include "series.h"

namespace {

// Points y of an integral, and how they change the odds of an item: by e^y, or by e^−y where p > ½.
struct Points {
  static constexpr int at_once = 64;
  double up[at_once], down[at_once];  // e^y − 1, e^−y − 1
  int count;
  double largest;  // |y|
};

constexpr int kBeside = 4;  // points whose products are computed side by side

// Multiplies Π (1 + q·(up or down)) over the items from `begin` to `end` into the products of kBeside points, a log each.
// Blocks of factors are multiplied less 1, which keeps the digits of factors near 1.
template <class V>
inline void multiply(const double* q, int64_t begin, int64_t end, int64_t block, const double* up, const double* down,
                     double* logs) {
  using reg = typename V::reg;
  using mask_t = typename V::mask_t;
  constexpr int64_t w = V::width;
  reg total[kBeside], product[kBeside], grow[kBeside], shrink[kBeside];
  mask_t exponent[kBeside];
  for (int g = 0; g < kBeside; ++g) {
    total[g] = V::set(1);
    exponent[g] = mask_t{};
    grow[g] = V::set(up[g]);
    shrink[g] = V::set(down[g]);
  }
  const auto step = [&](reg signed_q) {
    const mask_t is_above = (mask_t)signed_q < 0;
    const reg size = V::abs(signed_q);
    for (int g = 0; g < kBeside; ++g) {
      const reg f = V::mul(size, V::blend(is_above, shrink[g], grow[g]));
      product[g] = V::fma(product[g], f, V::add(product[g], f));
    }
  };
  for (int64_t i = begin; i < end;) {
    const int64_t stop = end - i < block * w ? end : i + block * w;
    for (int g = 0; g < kBeside; ++g) product[g] = V::set(0);
    for (; i + w <= stop; i += w) step(V::load(q + i));
    if (i < stop) step(load_part(q + i, stop - i, V::set(0)));
    i = stop;
    for (int g = 0; g < kBeside; ++g) {
      const mask_t bits = (mask_t)V::fma(total[g], product[g], total[g]);
      exponent[g] += ((bits >> 52) & 0x7ff) - 1023;
      total[g] = (reg)((bits & 0x000fffffffffffff) | 0x3ff0000000000000);
    }
  }
  for (int g = 0; g < kBeside; ++g) {
    double all = 1;
    int64_t powers = 0;
    for (int lane = 0; lane < V::width; ++lane) {
      all *= total[g][lane];
      powers += exponent[g][lane];
    }
    logs[g] = std::log(all) + 0.6931471805599453 * (double)powers;
  }
}

// The logarithms of Π (1 + q·(up or down)) over all items, of each point.
template <class V> void log_products(const double* q, int64_t n, int threads, const Points& points, double* logs) {
  const double growth = std::log1p(0.5 * std::exp(points.largest));  // of a factor, at most
  const auto most = (int64_t)(600 / growth);                         // without overflow
  const int64_t block = most < 1 ? 1 : most < 32 ? most : 32;
  for (int j = 0; j < Points::at_once; ++j) logs[j] = 0;
  for_chunks<Points::at_once>(n, threads, logs, [&](int64_t begin, int64_t end, double* part) {
    for (int j = 0; j < Points::at_once; ++j) part[j] = 0;
    for (int j = 0; j < points.count; j += kBeside)
      multiply<V>(q, begin, end, block, points.up + j, points.down + j, part + j);
  });
}

constexpr double kFall = 46;             // the integrand is followed until it has fallen by e^−46
constexpr double kStep = 0.5;            // at most, between nodes
constexpr double kFarthest = 600;        // nodes beyond are left to another method
constexpr int kMostNodes = 2 * (int)(kFarthest / kStep) + 2;

// c_i = ∫ e^{g(y)} σ(−θ_i − y) dy with g(y) = ky − Σ log(1 + e^{θ + y}), up to a factor, as _math/high_entropy.py. Reads
// k, the number of items to be drawn that are not certain. False if the row is left to another method.
template <class V> bool pareto_row(const double* theta, int64_t n, double k, int threads, double* c) {
  using reg = typename V::reg;
  constexpr double largest = Limits<double>::largest;
  double sums[5];
  accumulate_row<V, 5>(n, threads, sums, [=](auto at, auto* lanes) {
    const reg t = at.load(theta), one = V::set(1);
    const auto is_open = at.only(V::ge(V::set(largest), V::abs(t))), is_above = V::gt(t, V::set(0));
    const reg q = V::keep(is_open, tail_of<V>(t));
    at.store(c, V::with_sign(q, V::blend(is_above, V::set(-1), one)));
    lanes[0] = V::add(lanes[0], V::mul(q, V::sub(one, q)));
    lanes[1] = V::add(lanes[1], V::keep(is_open, one));
    lanes[2] = V::add(lanes[2], V::keep(V::both(is_open, is_above), one));
    lanes[3] = V::add(lanes[3], V::keep(at.only(V::gt(t, V::set(largest))), one));
    lanes[4] = V::add(lanes[4], V::keep(V::both(is_open, V::gt(V::abs(t), V::set(700))), one));
  });
  const double spread = sums[0], open = sums[1], above = sums[2], size = k - sums[3];
  if (open == 0) {
    for (int64_t i = 0; i < n; ++i) c[i] = 0;
    return true;
  }
  if (sums[4] > 0 || !(size > 0 && size < open)) return false;  // too small to be summed, or no maximum

  double y[kMostNodes], weight[kMostNodes], back[kMostNodes], up[kMostNodes], down[kMostNodes], logs[Points::at_once];
  Points points;
  const auto exponents = [&](const double* at, int count, double* result) {
    points.largest = 0;
    points.count = count;
    for (int j = 0; j < count; ++j) {
      points.up[j] = std::expm1(at[j]);
      points.down[j] = std::expm1(-at[j]);
      points.largest = std::fabs(at[j]) > points.largest ? std::fabs(at[j]) : points.largest;
    }
    for (int j = count; j % kBeside; ++j) points.up[j] = points.down[j] = 0;
    log_products<V>(c, n, threads, points, logs);
    for (int j = 0; j < count; ++j) result[j] = (size - above) * at[j] - logs[j];
  };
  const double reach = std::sqrt(2 * kFall / (spread > 1e-3 ? spread : 1e-3));
  double ends[2] = {-reach, reach}, at_ends[2];
  for (bool is_short = true; is_short;) {
    is_short = false;
    exponents(ends, 2, at_ends);
    for (int e = 0; e < 2; ++e)
      if (!(at_ends[e] <= -kFall)) {
        is_short = true;
        ends[e] *= 1.5;
        if (!(std::fabs(ends[e]) <= kFarthest)) return false;
      }
  }
  const double wanted = 1 / (1.6 * std::sqrt(spread)), apart = wanted < kStep ? wanted : kStep;
  const double steps = std::ceil((ends[1] - ends[0]) / apart);
  if (!(steps < kMostNodes)) return false;
  const int nodes = (int)steps + 1;
  for (int j = 0; j < nodes; ++j) y[j] = ends[0] + (ends[1] - ends[0]) * j / (nodes - 1);
  for (int j = 0; j < nodes; j += Points::at_once) {
    const int some = nodes - j < Points::at_once ? nodes - j : Points::at_once;
    exponents(y + j, some, weight + j);
  }
  for (int j = 0; j < nodes; ++j) {
    weight[j] = std::exp(weight[j]);
    up[j] = std::exp(y[j]);
  }
  double none[1];
  Series<V> series;
  for (int j = 0; j < nodes; ++j)
    for (int m = 0; m < kTerms; ++m)
      series.value[m] += weight[j] / (0.5 * (1 - series.x[m]) + 0.5 * (1 + series.x[m]) * up[j]);
  if (series.fits()) {  // a function of p alone, times 1 − p
    accumulate_row<V, 1>(n, threads, none, [&](auto at, auto*) {
      const reg t = at.load(theta), q = V::abs(at.load(c)), one = V::set(1);
      const reg rest = V::blend(V::gt(t, V::set(0)), q, V::sub(one, q));
      const reg value = series.at(V::fnma(V::set(2), rest, one));
      at.store(c, V::keep(V::ge(V::set(largest), V::abs(t)), V::mul(rest, value)));
    });
    return true;
  }
  for (int j = 0; j < nodes; ++j) {
    up[j] = std::expm1(y[j]);
    down[j] = std::expm1(-y[j]);
    back[j] = weight[j] * std::exp(-y[j]);
  }
  accumulate_row<V, 1>(n, threads, none, [&, nodes](auto at, auto*) {
    const reg t = at.load(theta), q = V::abs(at.load(c)), one = V::set(1);
    const auto is_above = V::gt(t, V::set(0));
    reg value = V::set(0);
    for (int j = 0; j < nodes; ++j) {
      const reg f = V::mul(q, V::blend(is_above, V::set(down[j]), V::set(up[j])));
      const reg top = V::blend(is_above, V::set(back[j]), V::set(weight[j]));
      value = V::add(value, V::div(top, V::add(one, f)));
    }
    const reg rest = V::blend(is_above, q, V::sub(one, q));
    at.store(c, V::keep(V::ge(V::set(largest), V::abs(t)), V::mul(rest, value)));
  });
  return true;
}

}  // namespace
