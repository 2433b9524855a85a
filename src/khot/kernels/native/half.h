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
inline Halves halves_of(FloatBits words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }
#else
inline FloatBits words_of(const uint16_t* from) {
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return __builtin_convertvector(h, FloatBits);
}
inline Halves halves_of(FloatBits words) { return __builtin_convertvector(words, Halves); }
#endif

inline void put(uint16_t* to, Halves h) { std::memcpy(to, &h, sizeof h); }
// To an address that is a multiple of their size, as `store_past`.
inline void put_past(uint16_t* to, Halves h) {
#if defined(__AVX512F__)
  _mm256_stream_si256((__m256i*)to, (__m256i)h);
#elif defined(__AVX2__)
  _mm_stream_si128((__m128i*)to, (__m128i)h);
#else
  put(to, h);
#endif
}

struct Bfloat16 {
  static Floats load(const uint16_t* from) { return (Floats)(words_of(from) << 16); }
  // Rounded to the nearest, ties to even. NaN stays NaN: it has none of the lower 16 bits, as it comes from 16 bits or from
  // the processor.
  static Halves narrow(Floats v) {
    const auto u = (FloatBits)v;
    return halves_of((u + 0x7fffu + (u >> 16 & 1)) >> 16);
  }
};

struct Float16 {
#if defined(__AVX512F__)
  static Floats load(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
  static Halves narrow(Floats v) { return (Halves)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
  static Floats load(const uint16_t* from) {
    const FloatBits h = words_of(from), size = (h & 0x7fffu) << 13;  // a float of 2^−112 times the value
    const auto scaled = (FloatBits)((Floats)size * 0x1p112f);
    return (Floats)((size >= 0x0f800000u ? size | 0x7f800000u : scaled) | (h & 0x8000u) << 16);
  }
  static Halves narrow(Floats v) {
    const auto u = (FloatBits)v;
    const FloatBits size = u & 0x7fffffffu, none{};
    const FloatBits usual = (size + 0xc8000fffu + (size >> 13 & 1)) >> 13;    // the exponent is 112 less
    const FloatBits small = (FloatBits)((Floats)size + 0.5f) - 0x3f000000u;  // steps of 2^−24
    const FloatBits large = v == v ? none + 0x7c00u : none + 0x7e00u;
    return halves_of((size < 0x38800000u ? small : size < 0x47800000u ? usual : large) | (u >> 16 & 0x8000u));
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
template <class H, bool Past = false, class V, bool M> inline void write(Full<V, M> at, uint16_t* to, Floats v) {
  (Past ? put_past : put)(to + at.i, H::narrow(v));
}
template <class H, bool Past = false, class V, bool M> inline void write(Part<V, M> at, uint16_t* to, Floats v) {
  uint16_t part[kHalves];
  put(part, H::narrow(v));
  std::memcpy(to + at.i, part, (size_t)at.count * sizeof *part);
}

// Calls body(Bfloat16()) or body(Float16()).
template <class Body> inline auto with_halves(int32_t dtype, Body body) {
  return dtype == KHOT_HALF ? body(Float16()) : body(Bfloat16());
}

// Calls body(read), where read(at, beyond) are a row's scores, whatever the mask says, and `beyond` behind its end.
template <class T, class Body> inline auto with_scores(const Row<T>& row, Body body) {
  if constexpr (sizeof(T) == 4)
    if (row.kept && row.kept->x) return with_halves(row.kept->dtype, [&](auto h) {
      const uint16_t* x = row.kept->x;
      return body([=](auto at, float beyond) {
        ask_for(x + at.i);
        return read<decltype(h)>(at, x, beyond);
      });
    });
  const T* x = row.x;
  return body([=](auto at, T beyond) { return at.load(x, beyond); });
}

// Calls body(true) if a row of 16 bits is to be written past the cache, and can, or body(false).
template <class Body> inline void with_past(bool goes_past, const uint16_t* to, Body body) {
  if (!goes_past || reinterpret_cast<uintptr_t>(to) % sizeof(Halves)) return body(std::false_type());
  body(std::true_type());
  flush_stores();
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
