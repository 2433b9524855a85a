// Short rows side by side, one row per lane: what a row sums to is then a lane, and no step leaves the registers.
#pragma once

#include "row.h"

namespace {

constexpr int kRows = Vec<float>::width;  // rows that are solved together

#if defined(__AVX512F__)
inline void transpose(Floats r[16]) {
  Floats a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // quarters
    const Floats low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x44), high = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xee);
    const Floats low2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x44);
    const Floats high2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xee);
    r[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    r[i + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}
#elif defined(__AVX2__)
inline void transpose(Floats r[8]) {
  Floats a[8], b[8];
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
#else
inline void transpose(Floats r[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) {
      const float other = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = other;
    }
}
#endif

// The sums of as many vectors as one has lanes, a lane each: by halves of what is left, half the work of a transposition.
#if defined(__AVX512F__)
inline Floats row_sums(const Floats* r) {
  Floats a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]) + _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44) + _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee);
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x44) + _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xee);
  return _mm512_shuffle_f32x4(c[0], c[1], 0x88) + _mm512_shuffle_f32x4(c[0], c[1], 0xdd);
}
inline Doubles row_sums(const Doubles* r) {
  Doubles a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = _mm512_unpacklo_pd(r[2 * i], r[2 * i + 1]) + _mm512_unpackhi_pd(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 2; ++i)
    b[i] = _mm512_shuffle_f64x2(a[2 * i], a[2 * i + 1], 0x44) + _mm512_shuffle_f64x2(a[2 * i], a[2 * i + 1], 0xee);
  return _mm512_shuffle_f64x2(b[0], b[1], 0x88) + _mm512_shuffle_f64x2(b[0], b[1], 0xdd);
}
#elif defined(__AVX2__)
inline Floats row_sums(const Floats* r) {
  Floats a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]) + _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 2; ++i)
    b[i] = _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44) + _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee);
  return _mm256_permute2f128_ps(b[0], b[1], 0x20) + _mm256_permute2f128_ps(b[0], b[1], 0x31);
}
inline Doubles row_sums(const Doubles* r) {
  Doubles a[2];
  for (int i = 0; i < 2; ++i)
    a[i] = _mm256_unpacklo_pd(r[2 * i], r[2 * i + 1]) + _mm256_unpackhi_pd(r[2 * i], r[2 * i + 1]);
  return _mm256_permute2f128_pd(a[0], a[1], 0x20) + _mm256_permute2f128_pd(a[0], a[1], 0x31);
}
#else
inline Floats row_sums(const Floats* r) {
  Floats a[4] = {r[0], r[1], r[2], r[3]};
  transpose(a);
  return (a[0] + a[2]) + (a[1] + a[3]);
}
inline Doubles row_sums(const Doubles* r) { return Doubles{r[0][0] + r[0][1], r[1][0] + r[1][1]}; }
#endif

// The sums of two vectors.
struct Pair {
  double first, second;
};
#if defined(__AVX2__)
inline Pair sums_of(Doubles a, Doubles b) {
#if defined(__AVX512F__)
  const Doubles both = (Doubles)_mm512_unpacklo_pd(a, b) + (Doubles)_mm512_unpackhi_pd(a, b);
  const __m256d half = _mm256_add_pd(_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd(both, 1));
#else
  const __m256d half = _mm256_add_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
#endif
  const __m128d sums = _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
  return {sums[0], sums[1]};
}
#else
inline Pair sums_of(Doubles a, Doubles b) { return {a[0] + a[1], b[0] + b[1]}; }
#endif

// Sums in float64, a lane per row.
struct Total {
  Doubles low{}, high{};
  void add(Floats v) {
    low += low_half(v);
    high += high_half(v);
  }
  Total plus(const Total& other) const { return {low + other.low, high + other.high}; }
  Total minus(const Total& other) const { return {low - other.low, high - other.high}; }
  Floats rounded() const { return ::rounded(low, high); }
  void store(double* to) const {
    Vec<double>::store(to, low);
    Vec<double>::store(to + kRows / 2, high);
  }
  Floats less(const double* k) const {
    return ::rounded(low - Vec<double>::load(k), high - Vec<double>::load(k + kRows / 2));
  }
};

// What rows of one length are asked for, a lane per row.
struct Group {
  int64_t n;
  double k64[kRows];
  Floats k, temperature;

  explicit Group(const Row<float>* rows) : n(rows->n) {
    double temperatures[kRows];
    for (int r = 0; r < kRows; ++r) {
      k64[r] = rows[r].k;
      temperatures[r] = rows[r].temperature;
    }
    const auto floats = [](const double* from) {
      return rounded(Vec<double>::load(from), Vec<double>::load(from + kRows / 2));
    };
    k = floats(k64);
    temperature = floats(temperatures);
  }
};

// Short rows as columns; beyond their end, as far as a block goes, −inf.
struct Columns : Group {
  using V = Vec<float>;
  Floats x[khot::kShort];

  // Calls visit(block, count) for each kRows columns, or fewer, while they are at hand. All rows have a mask, or none.
  template <class Visit> Columns(const Row<float>* rows, Visit visit) : Group(rows) {
    const int64_t length = n;  // a local: what is stored might alias the member
    in_blocks(length, rows->mask != nullptr, [&](auto at) {
      Floats* block = x + at.i;
      for (int r = 0; r < kRows; ++r) block[r] = at.scores(rows[r]);
      transpose(block);
      visit(block, length - at.i < kRows ? length - at.i : kRows);
    });
  }

  // Calls visit(at) for each kRows places of rows of n.
  template <class Visit> static void in_blocks(int64_t n, bool is_masked, Visit visit) {
    for (int64_t j = 0; j < n; j += kRows) {
      if (is_masked)
        visit(Part<V, true>{j, n - j < kRows ? n - j : kRows});
      else if (j + kRows <= n)
        visit(Full<V>{j});
      else
        visit(Part<V>{j, n - j});
    }
  }

  // Writes columns to the rows whose bit is set in `which`; transposes `y` in place.
  void store(unsigned which, Floats* y, float* const* out) const {
    for (int64_t j = 0; j < n; j += kRows) {
      transpose(y + j);
      for (int r = 0; r < kRows; ++r) {
        if (!(which >> r & 1)) continue;
        if (j + kRows <= n)
          Full<V>{j}.store(out[r], y[j + r]);
        else
          Part<V>{j, n - j}.store(out[r], y[j + r]);
      }
    }
  }
};

}  // namespace
