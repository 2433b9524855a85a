// Samples and their laws, pursuits, and attention.
#pragma once

#include "fuzz.h"

namespace {

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
