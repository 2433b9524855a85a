// The number of ones among independent draws: its characteristic function, and its distribution in trees of items.
#pragma once

#include "series.h"

namespace {

// ── characteristic functions of counts ───────────────────────────────────────────────────────────────────────────────
// Π (1 + p·step) over the items from `begin` to `end`, complex. Blocks are multiplied less 1, as above.
template <class V>
inline void turn(const double* p, int64_t begin, int64_t end, const double* step, double* product) {
  using reg = typename V::reg;
  constexpr int64_t w = V::width;
  const reg one = V::set(1), cosine = V::set(step[0]), sine = V::set(step[1]);
  reg real = one, imaginary = V::set(0);
  for (int64_t i = begin; i < end;) {
    const int64_t stop = end - i < 64 * w ? end : i + 64 * w;
    reg a[2] = {V::set(0), V::set(0)}, b[2] = {V::set(0), V::set(0)};
    const auto times = [&](reg of, int s) {
      const reg x = V::mul(of, cosine), y = V::mul(of, sine);
      const reg next = V::fma(a[s], x, V::fnma(b[s], y, V::add(a[s], x)));
      b[s] = V::fma(a[s], y, V::fma(b[s], x, V::add(b[s], y)));
      a[s] = next;
    };
    for (; i + 2 * w <= stop; i += 2 * w) {
      times(V::load(p + i), 0);
      times(V::load(p + i + w), 1);
    }
    for (; i < stop; i += w) times(load_part(p + i, stop - i < w ? stop - i : w, V::set(0)), 0);
    i = stop;
    for (int s = 0; s < 2; ++s) {
      const reg next = V::fma(real, a[s], V::fnma(imaginary, b[s], real));
      imaginary = V::fma(real, b[s], V::fma(imaginary, a[s], imaginary));
      real = next;
    }
  }
  product[0] = 1;
  product[1] = 0;
  for (int lane = 0; lane < V::width; ++lane) {
    const double next = product[0] * real[lane] - product[1] * imaginary[lane];
    product[1] = product[0] * imaginary[lane] + product[1] * real[lane];
    product[0] = next;
  }
}

constexpr int kMostPoints = 32;

// Π (1 + p·step) over a row, complex, for up to kMostPoints steps; 1 where weight is 0. Products of chunks are multiplied
// in order.
template <class V>
void count_products(const double* p, int64_t n, const double* step, const double* weight, int points, int threads,
                    double* product) {
  const int64_t chunks = (n + kChunk - 1) / kChunk, size = 2 * points;
  double* parts = nullptr;
  if (threads > 1 && chunks > 1)
    parts = static_cast<double*>(std::malloc((size_t)(chunks * size) * sizeof(double)));
  const auto chunk = [=](int64_t c, double* to) {
    const int64_t begin = c * kChunk, end = begin + kChunk < n ? begin + kChunk : n;
    for (int t = 0; t < points; ++t)
      if (weight[t] != 0) turn<V>(p, begin, end, step + 2 * t, to + 2 * t);
  };
  if (parts) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < chunks; ++c) chunk(c, parts + c * size);
  }
  for (int t = 0; t < points; ++t) {
    product[2 * t] = 1;
    product[2 * t + 1] = 0;
  }
  for (int64_t c = 0; c < chunks; ++c) {
    double here[2 * kMostPoints];
    if (!parts) chunk(c, here);
    const double* part = parts ? parts + c * size : here;
    for (int t = 0; t < points; ++t) {
      if (weight[t] == 0) continue;
      const double next = product[2 * t] * part[2 * t] - product[2 * t + 1] * part[2 * t + 1];
      product[2 * t + 1] = product[2 * t] * part[2 * t + 1] + product[2 * t + 1] * part[2 * t];
      product[2 * t] = next;
    }
  }
  std::free(parts);
}

// Σ Re(weight/(1 + p·step)) over points, and the same of weight·(1 + step), for each item of a row.
template <class V>
void count_rests(const double* p, int64_t n, const double* step, const double* weight, int points, int threads,
                 double* same, double* less) {
  using reg = typename V::reg;
  double none[1], turned[2 * kMostPoints];
  for (int t = 0; t < points; ++t) {
    const double a = 1 + step[2 * t], b = step[2 * t + 1];
    turned[2 * t] = weight[2 * t] * a - weight[2 * t + 1] * b;
    turned[2 * t + 1] = weight[2 * t] * b + weight[2 * t + 1] * a;
  }
  Series<V> series[2];
  for (int t = 0; t < points; ++t)
    for (int m = 0; m < kTerms; ++m) {
      const double at = 0.5 * (1 + series[0].x[m]), a = 1 + at * step[2 * t], b = at * step[2 * t + 1];
      const double inverse = 1 / (a * a + b * b);
      series[0].value[m] += (weight[2 * t] * a + weight[2 * t + 1] * b) * inverse;
      series[1].value[m] += (turned[2 * t] * a + turned[2 * t + 1] * b) * inverse;
    }
  if (series[0].fits() && series[1].fits()) {
    accumulate_row<V, 1>(n, threads, none, [&](auto at, auto*) {
      const reg of = at.load(p), x = V::sub(V::add(of, of), V::set(1));
      at.store(same, series[0].at(x));
      at.store(less, series[1].at(x));
    });
    return;
  }
  accumulate_row<V, 1>(n, threads, none, [&, points](auto at, auto*) {
    const reg of = at.load(p);
    reg sums[2] = {V::set(0), V::set(0)};
    for (int t = 0; t < points; ++t) {
      if (weight[2 * t] == 0 && weight[2 * t + 1] == 0) continue;
      const reg a = V::fma(of, V::set(step[2 * t]), V::set(1)), b = V::mul(of, V::set(step[2 * t + 1]));
      const reg inverse = V::div(V::set(1), V::fma(a, a, V::mul(b, b)));
      const auto term = [=](const double* by) {
        return V::mul(inverse, V::fma(V::set(by[0]), a, V::mul(V::set(by[1]), b)));
      };
      sums[0] = V::add(sums[0], term(weight + 2 * t));
      sums[1] = V::add(sums[1], term(turned + 2 * t));
    }
    at.store(same, sums[0]);
    at.store(less, sums[1]);
  });
}

// ── distributions of counts ──────────────────────────────────────────────────────────────────────────────────────────
// The trees over the leaves of as many blocks as a vector has lanes, a lane each: the nodes of 2^l leaves are at
// tree_level(l), each with 2^l + 1 vectors, its chances of 0, 1, … ones, of which those of more than `most` are not
// written. Leaves beyond counts[lane] are never ones.
template <class V>
void grow_trees(const double* const* leaves, const int64_t* counts, int bits, int64_t most, double* tree) {
  using reg = typename V::reg;
  constexpr int w = V::width;
  for (int64_t i = 0; i < (int64_t)1 << bits; ++i)
    for (int lane = 0; lane < w; ++lane) {
      const double p = i < counts[lane] ? leaves[lane][i] : 0;
      tree[2 * i * w + lane] = 1 - p;
      tree[(2 * i + 1) * w + lane] = p;
    }
  for (int level = 0; level < bits; ++level) {
    const int64_t size = (int64_t)1 << level;
    const double* below = tree + khot::tree_level(bits, level) * w;
    double* above = tree + khot::tree_level(bits, level + 1) * w;
    for (int64_t i = 0; i < (int64_t)1 << (bits - level - 1); ++i) {
      const double *left = below + 2 * i * (size + 1) * w, *right = left + (size + 1) * w;
      double* out = above + i * (2 * size + 1) * w;
      for (int64_t j = 0; j <= 2 * size && j <= most; ++j) {
        reg sum[2] = {V::set(0), V::set(0)};
        const int64_t first = j > size ? j - size : 0, last = j < size ? j : size;
        int64_t m = first;
        for (; m < last; m += 2)
          for (int s = 0; s < 2; ++s)
            sum[s] = V::fma(V::load(left + (m + s) * w), V::load(right + (j - m - s) * w), sum[s]);
        if (m == last) sum[0] = V::fma(V::load(left + m * w), V::load(right + (j - m) * w), sum[0]);
        V::store(out + j * w, V::add(sum[0], sum[1]));
      }
    }
  }
}

// out[i + j] = Σ a[i] b[j], `na` + `nb` − 1 numbers, with khot::kPad zeros before and behind a, b and out.
template <class V> void convolve(const double* a, int64_t na, const double* b, int64_t nb, double* out) {
  using reg = typename V::reg;
  if (na > nb) return convolve<V>(b, nb, a, na, out);
  for (int64_t i = 0; i < na; i += 4) {
    const reg a0 = V::set(a[i]), a1 = V::set(a[i + 1]), a2 = V::set(a[i + 2]), a3 = V::set(a[i + 3]);
    for (int64_t j = 0; j < nb + 3; j += V::width) {
      const double* at = b + j;
      const reg low = V::fma(a1, V::load(at - 1), V::mul(a0, V::load(at)));
      const reg high = V::fma(a3, V::load(at - 3), V::mul(a2, V::load(at - 2)));
      V::store(out + i + j, V::add(V::load(out + i + j), V::add(low, high)));
    }
  }
}

}  // namespace
