// σ_k of eight short rows at once, one row per lane: what a row sums to is then a lane, and no step leaves the registers.
//
// The quick way of sigmoid.h, transposed. Rows that it does not settle are left to the row kernel.
#pragma once

#include "kernels.h"
#include "sigmoid.h"

#ifdef KHOT_AVX2
namespace {

inline void transpose(__m256 r[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// Sums in float64, a lane per row.
struct Total {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(__m256 v) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  }
  __m256 less(const double* k) const {
    const __m128 a = _mm256_cvtpd_ps(_mm256_sub_pd(low, _mm256_loadu_pd(k)));
    const __m128 b = _mm256_cvtpd_ps(_mm256_sub_pd(high, _mm256_loadu_pd(k + 4)));
    return _mm256_set_m128(b, a);
  }
};

struct Block {
  const float* x;  // eight rows of n, one after another
  const uint8_t* mask;
  int64_t mask_row_stride, mask_stride, n;
};

// Columns of eight rows, padded with −inf to a multiple of eight, and each row's number, mean and variance of finite scores.
inline int64_t load_columns(const Block& rows, __m256* columns, __m256* count, __m256* mean, __m256* variance) {
  using V = Avx2Float;
  const float inf = std::numeric_limits<float>::infinity();
  const int64_t padded = (rows.n + 7) & ~(int64_t)7;
  __m256 origin = V::set(0), number = V::set(0), sum = V::set(0), squares = V::set(0);
  for (int64_t j = 0; j < padded; j += 8) {
    __m256* block = columns + j;
    for (int r = 0; r < 8; ++r) {
      const float* x = rows.x + r * rows.n + j;
      const uint8_t* m = rows.mask ? rows.mask + r * rows.mask_row_stride + j * rows.mask_stride : nullptr;
      if (j + 8 <= rows.n) {
        block[r] = m ? V::load_masked(x, m, rows.mask_stride) : V::load(x);
      } else {
        float padding[8];
        for (int64_t i = 0; i < 8; ++i)
          padding[i] = j + i < rows.n && (!m || m[i * rows.mask_stride]) ? x[i] : -inf;
        block[r] = V::load(padding);
      }
    }
    transpose(block);
    if (j == 0) origin = V::keep(V::ge(V::set(Limits<float>::largest), V::abs(block[0])), block[0]);
    for (int i = 0; i < 8; ++i) {
      const auto finite = V::ge(V::set(Limits<float>::largest), V::abs(block[i]));
      const auto d = V::keep(finite, V::sub(block[i], origin));
      number = V::add(number, V::keep(finite, V::set(1)));
      sum = V::add(sum, d);
      squares = V::fma(d, d, squares);
    }
  }
  const auto drift = V::div(sum, number);
  *count = number;
  *mean = V::add(origin, drift);
  *variance = V::max(V::fnma(drift, drift, V::div(squares, number)), V::set(0));
  return padded;
}

// Solves eight rows; p is written for those whose bit is NOT set in the result.
inline unsigned solve_lanes(const Block& rows, const double* k64, int64_t k_stride, const double* t64, int64_t t_stride, float* out) {
  using V = Avx2Float;
  alignas(32) float lanes[8];
  double counts[8];
  for (int r = 0; r < 8; ++r) lanes[r] = (float)(counts[r] = k64[r * k_stride]);
  const auto k = V::load(lanes);
  for (int r = 0; r < 8; ++r) lanes[r] = (float)t64[r * t_stride];
  const auto temperature = V::load(lanes), scale = V::div(V::set(1), temperature);

  __m256 x[khot::kShort], p[khot::kShort];
  __m256 count, mean, variance;
  const int64_t padded = load_columns(rows, x, &count, &mean, &variance);
  auto anchor = normal_guess<V>(count, mean, variance, k, temperature), shift = V::set(0);

  auto step = V::set(0), variability = V::set(0), bend = V::set(0);
  for (int pass = 0; pass < 3; ++pass) {
    __m256 sum[2] = {V::set(0), V::set(0)}, v1 = V::set(0), pv = V::set(0), vv = V::set(0);
    for (int64_t j = 0; j < padded; ++j) {
      p[j] = sigma_of<V>(V::fma(V::sub(anchor, x[j]), scale, shift));
      const auto v = V::fnma(p[j], p[j], p[j]);
      sum[j & 1] = V::add(sum[j & 1], p[j]);
      v1 = V::add(v1, v);
      pv = V::fma(p[j], v, pv);
      vv = V::fma(v, v, vv);
    }
    step = third_order_step<V>(V::add(sum[0], sum[1]), v1, pv, vv, count, k);
    variability = v1;
    bend = V::fnma(V::set(2), pv, v1);
    if (V::lanes(V::ge(V::abs(step), V::set(kLongStep))) == 0) break;  // NaN counts as small: its row fails below
    const auto moved = V::fnma(step, temperature, anchor);
    shift = V::mul(V::add(V::sub(V::sub(anchor, moved), V::mul(step, temperature)), V::mul(shift, temperature)), scale);
    anchor = moved;
  }
  auto is_near = V::gt(V::set(kLongStep), V::abs(step)), settled = is_near;  // a long step cannot be a polish
  for (int polish = 0; polish < 2; ++polish) {
    const auto grow = V::sub(exp_of<V>(V::max(V::min(step, V::set(1)), V::set(-1))), V::set(1));
    Total sum;
    for (int64_t j = 0; j < padded; ++j) {
      p[j] = shifted<V>(p[j], grow);
      sum.add(p[j]);
    }
    const auto excess = sum.less(counts);
    variability = V::fma(step, bend, variability);
    const auto limit = V::mul(V::set(4 * Limits<float>::eps), variability);
    const auto noise = V::mul(V::set(2 * Limits<float>::eps), V::sqrt(V::mul(k, V::min(k, V::set(1)))));
    const auto is_clear = V::ge(V::mul(V::set(4), limit), noise);
    settled = V::both(V::both(is_near, is_clear), V::ge(V::max(limit, noise), V::abs(excess)));
    step = V::sub(V::set(0), V::div(excess, variability));
    is_near = V::both(is_near, V::gt(V::set(kLongStep), V::abs(step)));
    if (V::lanes(settled) == 0xff) break;
  }
  const unsigned failed = ~V::lanes(settled) & 0xffu;
  for (int64_t j = 0; j < padded; j += 8) {
    transpose(p + j);
    for (int r = 0; r < 8; ++r) {
      if (failed >> r & 1) continue;
      float* to = out + r * rows.n + j;
      if (j + 8 <= rows.n) {
        V::store(to, p[j + r]);
      } else {
        V::store(lanes, p[j + r]);
        for (int64_t i = 0; j + i < rows.n; ++i) to[i] = lanes[i];
      }
    }
  }
  return failed;
}

}  // namespace
#endif
