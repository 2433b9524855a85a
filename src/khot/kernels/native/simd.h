// Vectors of scores: one portable lane, or AVX2. A kernel is written once, against this interface.
//
// mask_t holds a comparison per lane. NaN compares false, and every operation passes NaN on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define KHOT_AVX2 1
#endif

namespace {

template <class T> struct Limits;
template <> struct Limits<float> {
  static constexpr float eps = 1.1920929e-7f, tiny = 1.17549435e-38f, largest = 3.4028235e38f;
  static constexpr float exp_floor = -87.0f;  // e^z below this is 0: a denormal costs more than it is worth
};
template <> struct Limits<double> {
  static constexpr double eps = 2.220446049250313e-16, tiny = 2.2250738585072014e-308, largest = 1.7976931348623157e308;
  static constexpr double exp_floor = -708.0;
};

// e^r on |r| ≤ ln 2 / 2, highest power first: to 1e-7 (float, fitted for the least relative error) and 2e-16 (double,
// Taylor).
template <class T> struct ExpPolynomial;
template <> struct ExpPolynomial<float> {
  static constexpr int degree = 5;
  static constexpr float c[degree + 1] = {
      8.312520526e-3f, 4.189015796e-2f, 1.666711465e-1f, 4.999923149e-1f, 1.0f, 1.0f};
  static constexpr float log2e = 1.44269504f, ln2 = 0.693147181f, ln2_rest = 0, magic = 12582912.0f;
};
template <> struct ExpPolynomial<double> {
  static constexpr int degree = 12;
  static constexpr double c[degree + 1] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
  static constexpr double log2e = 1.4426950408889634, ln2 = 6.93147180369123816490e-01,
                          ln2_rest = 1.90821492927058770002e-10, magic = 6755399441055744.0;
};

// ── one lane ─────────────────────────────────────────────────────────────────────────────────────────────────────────
template <class T> struct Scalar {
  using scalar = T;
  using reg = T;
  using mask_t = bool;
  using bits = typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type;
  using whole = typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type;
  static constexpr int width = 1;

  static reg set(T v) { return v; }
  static reg load(const T* p) { return *p; }
  static reg load_masked(const T* p, const uint8_t* m, int64_t stride) {
    (void)stride;
    return *m ? *p : -std::numeric_limits<T>::infinity();
  }
  static void store(T* p, reg v) { *p = v; }
  static reg add(reg a, reg b) { return a + b; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg div(reg a, reg b) { return a / b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static reg fnma(reg a, reg b, reg c) { return c - a * b; }
  static reg min(reg a, reg b) { return b < a ? b : a; }  // NaN in a stays
  static reg max(reg a, reg b) { return b > a ? b : a; }
  static reg abs(reg a) { return std::fabs(a); }
  static reg sqrt(reg a) { return std::sqrt(a); }
  static reg log(reg a) { return std::log(a); }
  static mask_t gt(reg a, reg b) { return a > b; }
  static mask_t ge(reg a, reg b) { return a >= b; }
  static mask_t not_lt(reg a, reg b) { return !(a < b); }  // true for NaN
  static reg blend(mask_t m, reg yes, reg no) { return m ? yes : no; }
  static reg keep(mask_t m, reg a) { return m ? a : T(0); }
  static mask_t both(mask_t a, mask_t b) { return a && b; }
  static bool any(mask_t m) { return m; }
  // Stores the lanes that are set one after another; all of `to` may be written.
  static int pack(T* to, mask_t m, reg v) {
    *to = v;
    return m;
  }
  static reg scale2(reg v, reg shifted) {  // v·2^n, shifted = magic + n
    bits n, b;
    std::memcpy(&n, &shifted, sizeof n);
    std::memcpy(&b, &v, sizeof b);
    b += n << (sizeof(T) == 4 ? 23 : 52);
    std::memcpy(&v, &b, sizeof b);
    return v;
  }
  struct wide {  // a float64 accumulator
    double v = 0;
    void add(reg r) { v += (double)r; }
    double total() const { return v; }
  };
};

#ifdef KHOT_AVX2
// For each set of lanes, which 32-bit words to take: a byte each. A lane has `Words` of them.
template <int Words> struct PackTable {
  uint64_t at[1 << (8 / Words)] = {};
  constexpr PackTable() {
    for (unsigned set = 0; set < sizeof(at) / sizeof(at[0]); ++set)
      for (unsigned lane = 0, place = 0; lane < 8 / Words; ++lane)
        for (unsigned w = 0; (set >> lane & 1) && w < Words; ++w, ++place)
          at[set] |= (uint64_t)(lane * Words + w) << (8 * place);
  }
};
constexpr PackTable<1> kPack1;
constexpr PackTable<2> kPack2;

inline __m256 packed(__m256 v, uint64_t words) {
  return _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)words)));
}

struct Avx2Float {
  using scalar = float;
  using reg = __m256;
  using mask_t = __m256;
  static constexpr int width = 8;

  static reg set(float v) { return _mm256_set1_ps(v); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static reg load_masked(const float* p, const uint8_t* m, int64_t stride) {
    __m128i bytes;
    if (stride == 1) {
      bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(m));
    } else {
      bytes = _mm_setr_epi8(m[0], m[stride], m[2 * stride], m[3 * stride], m[4 * stride], m[5 * stride], m[6 * stride],
                            m[7 * stride], 0, 0, 0, 0, 0, 0, 0, 0);
    }
    const __m256i lanes = _mm256_cvtepu8_epi32(bytes);
    const __m256 forbidden = _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_setzero_si256()));
    return _mm256_blendv_ps(load(p), set(-std::numeric_limits<float>::infinity()), forbidden);
  }
  static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return _mm256_fnmadd_ps(a, b, c); }
  static reg min(reg a, reg b) { return _mm256_min_ps(b, a); }  // the instruction returns its second operand on NaN
  static reg max(reg a, reg b) { return _mm256_max_ps(b, a); }
  static reg abs(reg a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg log(reg y) {  // of a normal y > 0, to 1e-7
    // y = m·2^e with m in [√½, √2)
    const __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(y), _mm256_set1_epi32(0x3f3504f3));
    const __m256 e = _mm256_cvtepi32_ps(_mm256_srai_epi32(bits, 23));
    const __m256i m =
        _mm256_add_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f3504f3));
    const __m256 f = sub(_mm256_castsi256_ps(m), set(1));
    constexpr float c[7] = {8.700437984e-02f, -1.426749236e-01f, 1.491476952e-01f, -1.657758411e-01f,
                            1.996306361e-01f, -2.500133705e-01f, 3.333391074e-01f};
    __m256 poly = set(c[0]);
    for (int i = 1; i < 7; ++i) poly = fma(poly, f, set(c[i]));
    const __m256 ff = mul(f, f);
    return fma(e, set(0.69314718f), fma(mul(ff, f), poly, fnma(set(0.5f), ff, f)));
  }
  static mask_t gt(reg a, reg b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static mask_t ge(reg a, reg b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static mask_t not_lt(reg a, reg b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
  static reg blend(mask_t m, reg yes, reg no) { return _mm256_blendv_ps(no, yes, m); }
  static reg keep(mask_t m, reg a) { return _mm256_and_ps(m, a); }
  static mask_t both(mask_t a, mask_t b) { return _mm256_and_ps(a, b); }
  static bool any(mask_t m) { return _mm256_movemask_ps(m) != 0; }
  static unsigned lanes(mask_t m) { return (unsigned)_mm256_movemask_ps(m); }  // a bit per lane
  static int pack(float* to, mask_t m, reg v) {
    store(to, packed(v, kPack1.at[lanes(m)]));
    return __builtin_popcount(lanes(m));
  }
  static reg scale2(reg v, reg shifted) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), n));
  }
  struct wide {
    __m256d v = _mm256_setzero_pd();
    void add(reg r) {
      v = _mm256_add_pd(
          v, _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(r)), _mm256_cvtps_pd(_mm256_extractf128_ps(r, 1))));
    }
    double total() const {
      const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
      return _mm_cvtsd_f64(half) + _mm_cvtsd_f64(_mm_unpackhi_pd(half, half));
    }
  };
};

struct Avx2Double {
  using scalar = double;
  using reg = __m256d;
  using mask_t = __m256d;
  static constexpr int width = 4;

  static reg set(double v) { return _mm256_set1_pd(v); }
  static reg load(const double* p) { return _mm256_loadu_pd(p); }
  static reg load_masked(const double* p, const uint8_t* m, int64_t stride) {
    const __m256i lanes = _mm256_set_epi64x(m[3 * stride], m[2 * stride], m[stride], m[0]);
    const __m256d forbidden = _mm256_castsi256_pd(_mm256_cmpeq_epi64(lanes, _mm256_setzero_si256()));
    return _mm256_blendv_pd(load(p), set(-std::numeric_limits<double>::infinity()), forbidden);
  }
  static void store(double* p, reg v) { _mm256_storeu_pd(p, v); }
  static reg add(reg a, reg b) { return _mm256_add_pd(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_pd(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_pd(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_pd(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_pd(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return _mm256_fnmadd_pd(a, b, c); }
  static reg min(reg a, reg b) { return _mm256_min_pd(b, a); }
  static reg max(reg a, reg b) { return _mm256_max_pd(b, a); }
  static reg abs(reg a) { return _mm256_andnot_pd(set(-0.0), a); }
  static mask_t gt(reg a, reg b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
  static mask_t ge(reg a, reg b) { return _mm256_cmp_pd(a, b, _CMP_GE_OQ); }
  static mask_t not_lt(reg a, reg b) { return _mm256_cmp_pd(a, b, _CMP_NLT_UQ); }
  static reg blend(mask_t m, reg yes, reg no) { return _mm256_blendv_pd(no, yes, m); }
  static reg keep(mask_t m, reg a) { return _mm256_and_pd(m, a); }
  static mask_t both(mask_t a, mask_t b) { return _mm256_and_pd(a, b); }
  static bool any(mask_t m) { return _mm256_movemask_pd(m) != 0; }
  static int pack(double* to, mask_t m, reg v) {
    const auto set = (unsigned)_mm256_movemask_pd(m);
    store(to, _mm256_castps_pd(packed(_mm256_castpd_ps(v), kPack2.at[set])));
    return __builtin_popcount(set);
  }
  static reg scale2(reg v, reg shifted) {
    const __m256i n = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(v), n));
  }
  struct wide {
    __m256d v = _mm256_setzero_pd();
    void add(reg r) { v = _mm256_add_pd(v, r); }
    double total() const {
      const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
      return _mm_cvtsd_f64(half) + _mm_cvtsd_f64(_mm_unpackhi_pd(half, half));
    }
  };
};
#endif

// e^t for |t| ≤ −exp_floor, to which the caller clamps. For NaN it gives some number.
template <class V> inline typename V::reg exp_of(typename V::reg t) {
  using P = ExpPolynomial<typename V::scalar>;
  const auto magic = V::set(P::magic);
  const auto shifted = V::fma(t, V::set(P::log2e), magic);
  const auto n = V::sub(shifted, magic);
  auto r = V::fnma(n, V::set(P::ln2), t);
  if (P::ln2_rest != 0) r = V::fnma(n, V::set(P::ln2_rest), r);
  auto y = V::set(P::c[0]);
  for (int i = 1; i <= P::degree; ++i) y = V::fma(y, r, V::set(P::c[i]));
  return V::scale2(y, shifted);
}

// σ(z) from −z: NaN for NaN, and exactly 0 where e^{−z} would overflow.
template <class V> inline typename V::reg sigma_of(typename V::reg minus_z) {
  using L = Limits<typename V::scalar>;
  const auto t = V::max(minus_z, V::set(L::exp_floor));
  const auto one = V::fma(t, V::set(0), V::set(1));  // NaN for NaN
  return V::keep(V::not_lt(V::set(-L::exp_floor), t), V::div(one, V::add(V::set(1), exp_of<V>(t))));
}

// e^{−|z|}, and exactly 0 where that would underflow.
template <class V> inline typename V::reg small_exp(typename V::reg minus_z) {
  const auto t = V::sub(V::set(0), V::abs(minus_z)), floor = V::set(Limits<typename V::scalar>::exp_floor);
  return V::keep(V::ge(t, floor), exp_of<V>(V::max(t, floor)));
}

// min(σ(z), σ(−z)), to all digits however small.
template <class V> inline typename V::reg tail_of(typename V::reg minus_z) {
  const auto e = small_exp<V>(minus_z);
  return V::div(e, V::add(V::set(1), e));
}

// σ(logit p + step) for grow = e^step − 1.
template <class V> inline typename V::reg shifted(typename V::reg p, typename V::reg grow) {
  const auto t = V::mul(p, grow);
  return V::div(V::add(p, t), V::add(V::set(1), t));
}

}  // namespace
