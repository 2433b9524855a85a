// Orthogonal matching pursuit of one signal, given its correlations with all atoms and the Gram matrix.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace khot {
namespace {

constexpr double kDependent = 1e-12, kClose = 0.1;  // as in _math/pursuit.py

// alpha −= Σ_j by_j·rows_j; returns the largest |alpha|.
template <class V>
typename V::scalar subtract(int64_t n, int64_t count, const typename V::scalar* by,
                            const typename V::scalar* const* rows, typename V::scalar* alpha) {
  using T = typename V::scalar;
  using Lane = Scalar<T>;
  constexpr int w = V::width;
  auto best = V::set(0);
  int64_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    auto a = V::load(alpha + i), b = V::load(alpha + i + w), c = V::load(alpha + i + 2 * w),
         d = V::load(alpha + i + 3 * w);
    for (int64_t j = 0; j < count; ++j) {
      const auto s = V::set(by[j]);
      const T* row = rows[j] + i;
      a = V::fnma(s, V::load(row), a);
      b = V::fnma(s, V::load(row + w), b);
      c = V::fnma(s, V::load(row + 2 * w), c);
      d = V::fnma(s, V::load(row + 3 * w), d);
    }
    V::store(alpha + i, a);
    V::store(alpha + i + w, b);
    V::store(alpha + i + 2 * w, c);
    V::store(alpha + i + 3 * w, d);
    best = V::max(best, V::max(V::max(V::abs(a), V::abs(b)), V::max(V::abs(c), V::abs(d))));
  }
  T lanes[w], largest = 0;
  V::store(lanes, best);
  for (int lane = 0; lane < w; ++lane) largest = Lane::max(largest, lanes[lane]);
  for (; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j) alpha[i] = Lane::fnma(by[j], rows[j][i], alpha[i]);
    largest = Lane::max(largest, Lane::abs(alpha[i]));
  }
  return largest;
}

// The first place with |alpha| ≥ value, or n.
template <class V> int64_t place_of(int64_t n, typename V::scalar value, const typename V::scalar* alpha) {
  int64_t i = 0;
  while (i + V::width <= n && !V::any(V::ge(V::abs(V::load(alpha + i)), V::set(value)))) i += V::width;
  while (i < n && !(std::fabs(alpha[i]) >= value)) ++i;
  return i;
}

// The inverse Cholesky factor M of the support's Gram matrix grows by a row a step: c += z·M_t, α −= z·M_t·G_S.
template <class V> int64_t pursue(const Signal<typename V::scalar>& s, const Room<typename V::scalar>& room) {
  using T = typename V::scalar;
  double left = s.square;
  T largest = subtract<V>(s.n, 0, room.by, room.rows, s.alpha);
  int64_t t = 0;
  for (; t < s.count && left > s.enough; ++t) {
    const int64_t best = place_of<V>(s.n, largest, s.alpha);
    if (best == s.n) break;
    const T* row = s.gram + best * s.n;
    const double size = (double)row[best], value = (double)s.alpha[best];
    double outside = size;
    for (int64_t i = 0; i < t; ++i) {
      double sum = 0;
      const double* m = room.inverse + i * s.slots;
      for (int64_t j = 0; j <= i; ++j) sum += m[j] * (double)row[s.atoms[j]];
      room.lower[i] = sum;
      outside -= sum * sum;
    }
    if (!(outside > kDependent * size) || !(value * value > s.noise * size)) break;
    const double scale = 1 / std::sqrt(outside), z = value * scale;
    double* last = room.inverse + t * s.slots;
    for (int64_t j = 0; j < t; ++j) last[j] = 0;
    for (int64_t i = 0; i < t; ++i) {
      const double* m = room.inverse + i * s.slots;
      for (int64_t j = 0; j <= i; ++j) last[j] -= room.lower[i] * scale * m[j];
    }
    last[t] = scale;
    s.atoms[t] = best;
    room.rows[t] = row;
    for (int64_t j = 0; j <= t; ++j) {
      room.by[j] = (T)(z * last[j]);
      s.coefs[j] += room.by[j];
    }
    left -= z * z;
    *s.is_close |= outside < kClose * size;
    if (t + 1 < s.count) largest = subtract<V>(s.n, t + 1, room.by, room.rows, s.alpha);
  }
  return t;
}

}  // namespace
}  // namespace khot
