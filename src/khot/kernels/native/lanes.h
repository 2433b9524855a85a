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

// log y for normal y > 0.
inline __m256 log_of(__m256 y) {
  using V = Avx2Float;
  // y = m·2^e with m in [√½, √2)
  const __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(y), _mm256_set1_epi32(0x3f3504f3));
  const __m256 e = _mm256_cvtepi32_ps(_mm256_srai_epi32(bits, 23));
  const __m256i m = _mm256_add_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f3504f3));
  const __m256 f = V::sub(_mm256_castsi256_ps(m), V::set(1));
  constexpr float c[7] = {8.700437984e-02f,  -1.426749236e-01f, 1.491476952e-01f, -1.657758411e-01f,
                          1.996306361e-01f, -2.500133705e-01f, 3.333391074e-01f};
  __m256 poly = V::set(c[0]);
  for (int i = 1; i < 7; ++i) poly = V::fma(poly, f, V::set(c[i]));
  const __m256 ff = V::mul(f, f);
  const __m256 log_m = V::fma(V::mul(ff, f), poly, V::fnma(V::set(0.5f), ff, f));
  return V::fma(e, V::set(0.69314718f), log_m);
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
inline int64_t gather(const Block& rows, __m256* columns, __m256* count, __m256* mean, __m256* variance) {
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

// As third_order_step in sigmoid.h, a lane per row.
inline __m256 third_order_steps(__m256 p, __m256 v, __m256 pv, __m256 vv, __m256 n, __m256 k) {
  using V = Avx2Float;
  const auto one = V::set(1), two = V::set(2);
  const auto per = V::div(one, n);
  const auto s = V::mul(p, per), c = V::fnma(two, s, one);
  const auto l1 = V::div(one, V::mul(s, V::sub(one, s)));
  const auto l2 = V::sub(V::set(0), V::mul(c, V::mul(l1, l1)));
  const auto l3 = V::mul(V::mul(two, V::mul(l1, l1)), V::fma(V::mul(c, c), l1, one));
  const auto s1 = V::mul(v, per), s2 = V::mul(V::fnma(two, pv, v), per), s3 = V::mul(V::fnma(V::set(6), vv, v), per);
  const auto g1 = V::mul(l1, s1), g2 = V::fma(l2, V::mul(s1, s1), V::mul(l1, s2));
  const auto cubic = V::fma(V::mul(V::set(3), l2), V::mul(s1, s2), V::mul(l1, s3));
  const auto g3 = V::fma(l3, V::mul(s1, V::mul(s1, s1)), cubic);
  const auto r = V::sub(log_of(V::div(p, k)), log_of(V::div(V::sub(n, p), V::sub(n, k))));
  const auto newton = V::sub(V::set(0), V::div(r, g1));
  auto d = newton;
  auto usable = V::ge(one, one);
  for (int i = 0; i < 3; ++i) {
    const auto half = V::mul(g2, V::set(0.5f)), sixth = V::mul(g3, V::set(1.0f / 6));
    const auto f = V::fma(d, V::fma(d, V::fma(d, sixth, half), g1), r);
    const auto slope = V::fma(d, V::fma(d, V::mul(g3, V::set(0.5f)), g2), g1);
    usable = V::both(usable, V::gt(slope, V::mul(g1, V::set(0.25f))));
    d = V::sub(d, V::div(f, slope));
  }
  usable = V::both(usable, V::ge(V::mul(two, V::abs(newton)), V::abs(d)));
  return V::blend(usable, d, newton);
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
  const int64_t padded = gather(rows, x, &count, &mean, &variance);
  // The guess of sigmoid.h.
  const auto share = log_of(V::div(k, count)), rest = log_of(V::div(V::sub(count, k), count));
  const auto width = _mm256_sqrt_ps(V::fma(V::set((float)(kPi / 8)), variance, V::mul(temperature, temperature)));
  const auto middle = V::fnma(V::sub(share, rest), width, mean);
  const auto drift = V::mul(V::mul(variance, V::set(0.5f)), scale);
  const auto above = V::fnma(temperature, share, V::add(mean, drift)), below = V::fma(temperature, rest, V::sub(mean, drift));
  auto anchor = V::blend(V::gt(count, V::add(k, k)), V::min(middle, above), V::max(middle, below)), shift = V::set(0);

  const auto floor = V::set(Limits<float>::exp_floor), ceiling = V::set(-Limits<float>::exp_floor);
  auto step = V::set(0), variability = V::set(0), bend = V::set(0);
  for (int pass = 0; pass < 3; ++pass) {
    __m256 sum[2] = {V::set(0), V::set(0)}, v1 = V::set(0), pv = V::set(0), vv = V::set(0);
    for (int64_t j = 0; j < padded; ++j) {
      const auto t = V::max(V::fma(V::sub(anchor, x[j]), scale, shift), floor);
      const auto one = V::fma(t, V::set(0), V::set(1));
      p[j] = V::keep(V::not_lt(ceiling, t), V::div(one, V::add(V::set(1), exp_of<V>(t))));
      const auto v = V::fnma(p[j], p[j], p[j]);
      sum[j & 1] = V::add(sum[j & 1], p[j]);
      v1 = V::add(v1, v);
      pv = V::fma(p[j], v, pv);
      vv = V::fma(v, v, vv);
    }
    step = third_order_steps(V::add(sum[0], sum[1]), v1, pv, vv, count, k);
    variability = v1;
    bend = V::fnma(V::set(2), pv, v1);
    if (V::count(V::ge(V::abs(step), V::set(0.5f))) == 0) break;  // NaN counts as small: its row fails below
    const auto moved = V::fnma(step, temperature, anchor);
    shift = V::mul(V::add(V::sub(V::sub(anchor, moved), V::mul(step, temperature)), V::mul(shift, temperature)), scale);
    anchor = moved;
  }
  auto is_near = V::gt(V::set(0.5f), V::abs(step)), settled = is_near;  // a long step cannot be a polish
  for (int polish = 0; polish < 2; ++polish) {
    const auto grow = V::sub(exp_of<V>(V::max(V::min(step, V::set(1)), V::set(-1))), V::set(1));
    Total sum;
    for (int64_t j = 0; j < padded; ++j) {
      const auto t = V::mul(p[j], grow);
      p[j] = V::div(V::add(p[j], t), V::add(V::set(1), t));
      sum.add(p[j]);
    }
    const auto excess = sum.less(counts);
    variability = V::fma(step, bend, variability);
    const auto limit = V::mul(V::set(4 * Limits<float>::eps), variability);
    const auto noise = V::mul(V::set(2 * Limits<float>::eps), _mm256_sqrt_ps(V::mul(k, V::min(k, V::set(1)))));
    const auto is_clear = V::ge(V::mul(V::set(4), limit), noise);
    settled = V::both(V::both(is_near, is_clear), V::ge(V::max(limit, noise), V::abs(excess)));
    step = V::sub(V::set(0), V::div(excess, variability));
    is_near = V::both(is_near, V::gt(V::set(0.5f), V::abs(step)));
    if (V::count(settled) == 8) break;
  }
  const unsigned failed = ~(unsigned)_mm256_movemask_ps(settled) & 0xffu;
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
