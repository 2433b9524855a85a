// bfloat16 and float16 to float32 and back, a vector at a time.
#pragma once

#include "khot.h"
#include "simd.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));  // as many as there are floats in a vector
constexpr int kHalves = kBytes / 4;

inline FloatBits words_of(const uint16_t* from) {
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return __builtin_convertvector(h, FloatBits);
}
inline void put(uint16_t* to, FloatBits words) {
  const Halves h = __builtin_convertvector(words, Halves);
  std::memcpy(to, &h, sizeof h);
}

struct Bfloat16 {
  static Floats load(const uint16_t* from) { return (Floats)(words_of(from) << 16); }
  // Rounded to the nearest, ties to even; NaN stays NaN.
  static void store(uint16_t* to, Floats v) {
    const auto u = (FloatBits)v;
    const FloatBits rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    put(to, v == v ? rounded : FloatBits{} + 0x7fc0u);
  }
};

struct Float16 {
#if defined(__AVX512F__)
  static Floats load(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
  static void store(uint16_t* to, Floats v) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  static Floats load(const uint16_t* from) {
    const FloatBits h = words_of(from), size = (h & 0x7fffu) << 13;  // a float of 2^−112 times the value
    const auto scaled = (FloatBits)((Floats)size * 0x1p112f);
    return (Floats)((size >= 0x0f800000u ? size | 0x7f800000u : scaled) | (h & 0x8000u) << 16);
  }
  static void store(uint16_t* to, Floats v) {
    const auto u = (FloatBits)v;
    const FloatBits size = u & 0x7fffffffu, none{};
    const FloatBits usual = (size + 0xc8000fffu + (size >> 13 & 1)) >> 13;    // the exponent is 112 less
    const FloatBits small = (FloatBits)((Floats)size + 0.5f) - 0x3f000000u;  // steps of 2^−24
    const FloatBits large = v == v ? none + 0x7c00u : none + 0x7e00u;
    put(to, (size < 0x38800000u ? small : size < 0x47800000u ? usual : large) | (u >> 16 & 0x8000u));
  }
#endif
};

template <class H> inline void widen_as(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) Vec<float>::store(to + i, H::load(from + i));
  if (i == n) return;
  uint16_t part[kHalves] = {};
  std::memcpy(part, from + i, (size_t)(n - i) * sizeof *part);
  store_part(to + i, H::load(part), n - i);
}
template <class H> inline void narrow_as(const float* from, int64_t n, uint16_t* to) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) H::store(to + i, Vec<float>::load(from + i));
  if (i == n) return;
  uint16_t part[kHalves];
  H::store(part, load_part(from + i, n - i, Floats{}));
  std::memcpy(to + i, part, (size_t)(n - i) * sizeof *part);
}

inline void widen(int32_t dtype, const uint16_t* from, int64_t n, float* to) {
  dtype == KHOT_HALF ? widen_as<Float16>(from, n, to) : widen_as<Bfloat16>(from, n, to);
}
inline void narrow(int32_t dtype, const float* from, int64_t n, uint16_t* to) {
  dtype == KHOT_HALF ? narrow_as<Float16>(from, n, to) : narrow_as<Bfloat16>(from, n, to);
}

}  // namespace
