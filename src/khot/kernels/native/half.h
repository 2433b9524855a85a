// bfloat16 and float16 to float32 and back, a vector at a time.
#pragma once

#include "row.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));  // as many as there are floats in a vector
constexpr int kHalves = kBytes / 4;

#if defined(__AVX512F__)  // GCC 12 makes four instructions of a conversion
inline FloatBits words_of(const uint16_t* from) {
  return (FloatBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
inline void put(uint16_t* to, FloatBits words) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)words));
}
#else
inline FloatBits words_of(const uint16_t* from) {
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return __builtin_convertvector(h, FloatBits);
}
inline void put(uint16_t* to, FloatBits words) {
  const Halves h = __builtin_convertvector(words, Halves);
  std::memcpy(to, &h, sizeof h);
}
#endif

struct Bfloat16 {
  static Floats load(const uint16_t* from) { return (Floats)(words_of(from) << 16); }
  // Rounded to the nearest, ties to even. NaN stays NaN: it has none of the lower 16 bits, as it comes from 16 bits or from
  // the processor.
  static void store(uint16_t* to, Floats v) {
    const auto u = (FloatBits)v;
    put(to, (u + 0x7fffu + (u >> 16 & 1)) >> 16);
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

// A vector of a row of 16 bits, as `Full` and `Part` read and write floats.
template <class H, class V, bool M> inline Floats read(Full<V, M> at, const uint16_t* from, float = 0) {
  return H::load(from + at.i);
}
template <class H, class V, bool M> inline Floats read(Part<V, M> at, const uint16_t* from, float beyond = 0) {
  uint16_t part[kHalves] = {};
  std::memcpy(part, from + at.i, (size_t)at.count * sizeof *part);
  return V::blend(at.only(~FloatMask{}), H::load(part), V::set(beyond));
}
template <class H, class V, bool M> inline void write(Full<V, M> at, uint16_t* to, Floats v) { H::store(to + at.i, v); }
template <class H, class V, bool M> inline void write(Part<V, M> at, uint16_t* to, Floats v) {
  uint16_t part[kHalves];
  H::store(part, v);
  std::memcpy(to + at.i, part, (size_t)at.count * sizeof *part);
}

// Calls body(Bfloat16()) or body(Float16()).
template <class Body> inline auto with_halves(int32_t dtype, Body body) {
  return dtype == KHOT_HALF ? body(Float16()) : body(Bfloat16());
}

inline void widen(int32_t dtype, const uint16_t* from, int64_t n, int threads, float* to) {
  double none[1];
  with_halves(dtype, [=, &none](auto h) {
    accumulate_row<Vec<float>, 1>(n, threads, none, [=](auto at, auto*) { at.store(to, read<decltype(h)>(at, from)); });
  });
}
inline void narrow(int32_t dtype, const float* from, int64_t n, int threads, uint16_t* to) {
  double none[1];
  with_halves(dtype, [=, &none](auto h) {
    accumulate_row<Vec<float>, 1>(n, threads, none, [=](auto at, auto*) { write<decltype(h)>(at, to, at.load(from)); });
  });
}

}  // namespace
