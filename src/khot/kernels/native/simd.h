// Vectors of scores, by the vector extensions of GCC and Clang: 64 bytes with AVX-512, 32 with AVX2, else 16 (SSE2, NEON,
// or whatever the compiler makes of them). A kernel is written once, against this interface; each file that includes it
// gets vectors of the width that it is compiled for, all in its own unnamed namespace. An intrinsic stands only where
// the extensions would need a loop.
//
// mask_t has a comparison per lane: all bits of the lane, or none. NaN compares false, and every operation passes NaN on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define KHOT_NEON 1
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

template <class T> using Whole = typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type;
template <class T> using Bits = typename std::make_unsigned<Whole<T>>::type;

// ── one lane: for the numbers of a row ───────────────────────────────────────────────────────────────────────────────
template <class T> struct Scalar {
  using scalar = T;
  using reg = T;
  using mask_t = bool;
  static constexpr int width = 1;

  static reg set(T v) { return v; }
  static reg add(reg a, reg b) { return a + b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static reg fnma(reg a, reg b, reg c) { return c - a * b; }
  static reg min(reg a, reg b) { return b < a ? b : a; }  // NaN in a stays
  static reg max(reg a, reg b) { return b > a ? b : a; }
  static reg abs(reg a) { return std::fabs(a); }
  static reg sqrt(reg a) { return std::sqrt(a); }
  static reg log(reg a) { return std::log(a); }
  static mask_t gt(reg a, reg b) { return a > b; }
  static mask_t ge(reg a, reg b) { return a >= b; }
  static reg blend(mask_t m, reg yes, reg no) { return m ? yes : no; }
  static mask_t both(mask_t a, mask_t b) { return a && b; }
};

// ── a vector ─────────────────────────────────────────────────────────────────────────────────────────────────────────
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef uint32_t FloatBits __attribute__((vector_size(kBytes)));
typedef uint64_t DoubleBits __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef int32_t FloatMask __attribute__((vector_size(kBytes)));
typedef int64_t DoubleMask __attribute__((vector_size(kBytes)));
typedef uint8_t FloatBytes __attribute__((vector_size(kBytes / 4)));  // one per lane
typedef uint8_t DoubleBytes __attribute__((vector_size(kBytes / 8)));

// √a, and the smaller and the larger of a and b, which is a if one is NaN.
#define KHOT_X86_LANES(mm)                                                       \
  inline Floats root(Floats a) { return mm##_sqrt_ps(a); }                       \
  inline Doubles root(Doubles a) { return mm##_sqrt_pd(a); }                     \
  inline Floats smaller(Floats a, Floats b) { return mm##_min_ps(b, a); }        \
  inline Doubles smaller(Doubles a, Doubles b) { return mm##_min_pd(b, a); }     \
  inline Floats larger(Floats a, Floats b) { return mm##_max_ps(b, a); }         \
  inline Doubles larger(Doubles a, Doubles b) { return mm##_max_pd(b, a); }

// a·b + c and c − a·b (rounded once if the machine can), a bit per lane, and the lanes that are set, packed; `count`
// lanes from memory and to it.
#if defined(__AVX512F__)
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Doubles fused_minus(Doubles a, Doubles b, Doubles c) { return _mm512_fnmadd_pd(a, b, c); }
KHOT_X86_LANES(_mm512)
inline unsigned bits_of(FloatMask m) { return _mm512_movepi32_mask((__m512i)m); }
inline unsigned bits_of(DoubleMask m) { return _mm512_movepi64_mask((__m512i)m); }
inline Doubles low_half(Floats r) { return _mm512_cvtps_pd(_mm512_castps512_ps256(r)); }
inline Floats rounded(Doubles low, Doubles high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}
inline Doubles high_half(Floats r) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(r, 1)); }
inline Floats packed(Floats v, unsigned set) { return _mm512_maskz_compress_ps((__mmask16)set, v); }
inline Doubles packed(Doubles v, unsigned set) { return _mm512_maskz_compress_pd((__mmask8)set, v); }
inline unsigned first_lanes(int64_t count) { return (1u << count) - 1; }
// t − ⌊t⌋, which is 0 for ±∞, and y·2^⌊t⌋; 1/d to 14 bits; the nearest whole number; and 1/d where t < most or t is NaN,
// else 0.
inline Floats fraction(Floats t) { return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Floats scaled(Floats y, Floats t) { return _mm512_scalef_ps(y, t); }
inline Doubles scaled(Doubles y, Doubles t) { return _mm512_scalef_pd(y, t); }
inline Floats rough_inverse(Floats d) { return _mm512_rcp14_ps(d); }
inline Doubles nearest(Doubles t) { return _mm512_roundscale_pd(t, 8); }
inline Doubles inverse_below(Doubles t, double most, Doubles d) {
  return _mm512_maskz_div_pd(_mm512_cmp_pd_mask(t, _mm512_set1_pd(most), _CMP_NGE_UQ), _mm512_set1_pd(1), d);
}
inline Floats load_part(const float* p, int64_t count, Floats fill) {
  return _mm512_mask_loadu_ps(fill, (__mmask16)first_lanes(count), p);
}
inline Doubles load_part(const double* p, int64_t count, Doubles fill) {
  return _mm512_mask_loadu_pd(fill, (__mmask8)first_lanes(count), p);
}
inline void store_part(float* p, Floats v, int64_t c) { _mm512_mask_storeu_ps(p, (__mmask16)first_lanes(c), v); }
inline void store_part(double* p, Doubles v, int64_t c) { _mm512_mask_storeu_pd(p, (__mmask8)first_lanes(c), v); }
#elif defined(__AVX2__)
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Doubles fused_minus(Doubles a, Doubles b, Doubles c) { return _mm256_fnmadd_pd(a, b, c); }
KHOT_X86_LANES(_mm256)
inline unsigned bits_of(FloatMask m) { return (unsigned)_mm256_movemask_ps((Floats)m); }
inline unsigned bits_of(DoubleMask m) { return (unsigned)_mm256_movemask_pd((Doubles)m); }
inline Doubles low_half(Floats r) { return _mm256_cvtps_pd(_mm256_castps256_ps128(r)); }
inline Floats rounded(Doubles low, Doubles high) { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
inline Doubles high_half(Floats r) { return _mm256_cvtps_pd(_mm256_extractf128_ps(r, 1)); }

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

inline Floats words(Floats v, uint64_t which) {
  return _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)which)));
}
inline Floats packed(Floats v, unsigned set) { return words(v, kPack1.at[set]); }
inline Doubles packed(Doubles v, unsigned set) { return (Doubles)words((Floats)v, kPack2.at[set]); }

inline __m256i first_lanes(int64_t count, float) {
  const FloatMask lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  return (__m256i)(lanes < (int32_t)count);
}
inline __m256i first_lanes(int64_t count, double) {
  const DoubleMask lanes = {0, 1, 2, 3};
  return (__m256i)(lanes < count);
}
inline Floats load_part(const float* p, int64_t count, Floats fill) {
  const __m256i m = first_lanes(count, 0.0f);
  return _mm256_blendv_ps(fill, _mm256_maskload_ps(p, m), (Floats)m);
}
inline Doubles load_part(const double* p, int64_t count, Doubles fill) {
  const __m256i m = first_lanes(count, 0.0);
  return _mm256_blendv_pd(fill, _mm256_maskload_pd(p, m), (Doubles)m);
}
inline void store_part(float* p, Floats v, int64_t count) { _mm256_maskstore_ps(p, first_lanes(count, 0.0f), v); }
inline void store_part(double* p, Doubles v, int64_t count) { _mm256_maskstore_pd(p, first_lanes(count, 0.0), v); }
#else
#if defined(KHOT_NEON)
inline Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
inline Doubles fused_minus(Doubles a, Doubles b, Doubles c) { return vfmsq_f64(c, a, b); }
inline Floats root(Floats a) { return vsqrtq_f32(a); }
inline Doubles root(Doubles a) { return vsqrtq_f64(a); }
inline unsigned bits_of(FloatMask m) { return vaddvq_u32((uint32x4_t)(m & FloatMask{1, 2, 4, 8})); }
inline unsigned bits_of(DoubleMask m) { return (unsigned)vaddvq_u64((uint64x2_t)(m & DoubleMask{1, 2})); }
#else
template <class R> inline R fused(R a, R b, R c) { return a * b + c; }
template <class R> inline R fused_minus(R a, R b, R c) { return c - a * b; }
#if defined(__SSE2__)
KHOT_X86_LANES(_mm)
inline unsigned bits_of(FloatMask m) { return (unsigned)_mm_movemask_ps((Floats)m); }
inline unsigned bits_of(DoubleMask m) { return (unsigned)_mm_movemask_pd((Doubles)m); }
#else
inline Floats root(Floats a) { return Floats{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
inline Doubles root(Doubles a) { return Doubles{std::sqrt(a[0]), std::sqrt(a[1])}; }
inline unsigned bits_of(FloatMask m) {
  return (unsigned)((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8));
}
inline unsigned bits_of(DoubleMask m) { return (unsigned)((m[0] & 1) | (m[1] & 2)); }
#endif
#endif
#if !defined(__SSE2__)
template <class R> inline R smaller(R a, R b) { return b < a ? b : a; }
template <class R> inline R larger(R a, R b) { return a < b ? b : a; }
#endif
inline Doubles low_half(Floats r) { return Doubles{(double)r[0], (double)r[1]}; }
inline Floats rounded(Doubles low, Doubles high) {
  return Floats{(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}
inline Doubles high_half(Floats r) { return Doubles{(double)r[2], (double)r[3]}; }
template <class R> inline R packed(R v, unsigned set) {
  R out = v;
  int count = 0;
  for (unsigned lane = 0; lane < kBytes / sizeof v[0]; ++lane)
    if (set >> lane & 1) out[count++] = v[lane];
  return out;
}
template <class T, class R> inline R load_part(const T* p, int64_t count, R fill) {
  for (int64_t i = 0; i < count; ++i) fill[i] = p[i];
  return fill;
}
template <class T, class R> inline void store_part(T* p, R v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}
#endif

// Stores to an address that is a multiple of kBytes, past the cache: what was there is not fetched first. Other threads see
// it after `flush_stores`.
#if defined(__AVX512F__)
inline void store_past(float* p, Floats v) { _mm512_stream_ps(p, v); }
inline void store_past(double* p, Doubles v) { _mm512_stream_pd(p, v); }
#elif defined(__AVX2__)
inline void store_past(float* p, Floats v) { _mm256_stream_ps(p, v); }
inline void store_past(double* p, Doubles v) { _mm256_stream_pd(p, v); }
#elif defined(__SSE2__)
inline void store_past(float* p, Floats v) { _mm_stream_ps(p, v); }
inline void store_past(double* p, Doubles v) { _mm_stream_pd(p, v); }
#else
template <class T, class R> inline void store_past(T* p, R v) { std::memcpy(p, &v, sizeof v); }
#endif
inline void flush_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Whether a·b + c is rounded once.
#if defined(__AVX2__) || defined(KHOT_NEON)
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif

template <class T> struct Vector;
template <> struct Vector<float> {
  using reg = Floats;
  using mask_t = FloatMask;
  using bits = FloatBits;
  using bytes = FloatBytes;
};
template <> struct Vector<double> {
  using reg = Doubles;
  using mask_t = DoubleMask;
  using bits = DoubleBits;
  using bytes = DoubleBytes;
};

template <class T> struct Vec {
  using scalar = T;
  using reg = typename Vector<T>::reg;
  using mask_t = typename Vector<T>::mask_t;
  using bits = typename Vector<T>::bits;
  using bytes = typename Vector<T>::bytes;
  static constexpr int width = kBytes / (int)sizeof(T);

  static reg set(T v) { return v - reg{}; }  // v for every lane, −0 included
  static mask_t iota() {  // 0, 1, 2, …
    mask_t lanes;
    for (int i = 0; i < width; ++i) lanes[i] = i;
    return lanes;
  }
  static reg load(const T* p) {
    reg r;
    std::memcpy(&r, p, sizeof r);
    return r;
  }
  static void store(T* p, reg v) { std::memcpy(p, &v, sizeof v); }
  // x where the mask, an entry each `stride` bytes, is not 0; else −inf. Reads `count` entries.
  static reg masked(reg x, const uint8_t* m, int64_t stride, int64_t count = width) {
    bytes b{};
    if (stride == 1 && count == width)
      std::memcpy(&b, m, sizeof b);
    else
      for (int64_t i = 0; i < count; ++i) b[i] = m[i * stride];
    return blend(__builtin_convertvector(b, mask_t) != 0, x, set(-std::numeric_limits<T>::infinity()));
  }
  static reg add(reg a, reg b) { return a + b; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg div(reg a, reg b) { return a / b; }
  static reg fma(reg a, reg b, reg c) { return fused(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return fused_minus(a, b, c); }
  static reg min(reg a, reg b) { return smaller(a, b); }  // NaN in a stays
  static reg max(reg a, reg b) { return larger(a, b); }
  static reg abs(reg a) { return (reg)((mask_t)a & std::numeric_limits<Whole<T>>::max()); }
  static reg with_sign(reg a, reg of) { return (reg)((mask_t)a | ((mask_t)of & std::numeric_limits<Whole<T>>::min())); }
  static reg minus_one_if_negative(reg a) { return __builtin_convertvector((mask_t)a < 0, reg); }  // −0 too
  static reg sqrt(reg a) { return root(a); }
  static reg log(reg y) {  // of a normal y > 0, to 1e-7: for floats
    // y = m·2^e with m in [√½, √2)
    const bits m = (bits)y - 0x3f3504f3u;
    const reg e = __builtin_convertvector((mask_t)m >> 23, reg);
    const reg f = (reg)((m & 0x007fffffu) + 0x3f3504f3u) - T(1);
    constexpr float c[7] = {8.700437984e-02f, -1.426749236e-01f, 1.491476952e-01f, -1.657758411e-01f,
                            1.996306361e-01f, -2.500133705e-01f, 3.333391074e-01f};
    reg poly = set(c[0]);
    for (int i = 1; i < 7; ++i) poly = fma(poly, f, set(c[i]));
    const reg ff = f * f;
    return fma(e, set(0.69314718f), fma(ff * f, poly, fnma(set(0.5f), ff, f)));
  }
  static mask_t gt(reg a, reg b) { return a > b; }
  static mask_t ge(reg a, reg b) { return a >= b; }
  static mask_t not_lt(reg a, reg b) { return ~(a < b); }  // true for NaN
  static reg blend(mask_t m, reg yes, reg no) { return m ? yes : no; }
  static reg keep(mask_t m, reg a) { return m ? a : reg{}; }
  static mask_t both(mask_t a, mask_t b) { return a & b; }
  static mask_t either(mask_t a, mask_t b) { return a | b; }
  static mask_t but_not(mask_t a, mask_t b) { return a & ~b; }
  static unsigned lanes(mask_t m) { return bits_of(m); }  // a bit per lane
  static bool any(mask_t m) { return lanes(m) != 0; }
  static reg scale2(reg v, reg shifted) {  // v·2^n, shifted = magic + n
    return (reg)((bits)v + ((bits)shifted << (sizeof(T) == 4 ? 23 : 52)));
  }
  static T total(reg v) {
    return folded(v, [](T a, T b) { return a + b; });
  }
  static T least(reg v) {  // no NaN
    return folded(v, [](T a, T b) { return b < a ? b : a; });
  }
  static T most(reg v) {
    return folded(v, [](T a, T b) { return b > a ? b : a; });
  }
  struct wide {  // a float64 accumulator
    Doubles v{};
    void add(reg r) {
      if constexpr (sizeof(T) == 4)
        v += low_half(r) + high_half(r);
      else
        v += r;
    }
    double total() const {
      return folded(v, [](double a, double b) { return a + b; });
    }
  };
 private:
  template <class R, class Fold, class S = typename std::remove_reference<decltype(R{}[0])>::type>
  static S folded(R v, Fold fold) {  // by halves
    constexpr int count = kBytes / (int)sizeof(S);
    S part[count];
    std::memcpy(part, &v, sizeof part);
    for (int half = count / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) part[i] = fold(part[i], part[i + half]);
    return part[0];
  }
};

}  // namespace
