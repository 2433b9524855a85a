// Eight short rows at once, one row per lane: what a row sums to is then a lane, and no step leaves the registers.
#pragma once

#include "row.h"

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
  Total plus(const Total& other) const { return {_mm256_add_pd(low, other.low), _mm256_add_pd(high, other.high)}; }
  Total minus(const Total& other) const { return {_mm256_sub_pd(low, other.low), _mm256_sub_pd(high, other.high)}; }
  __m256 rounded() const { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
  __m256 less(const double* k) const {
    const __m128 a = _mm256_cvtpd_ps(_mm256_sub_pd(low, _mm256_loadu_pd(k)));
    const __m128 b = _mm256_cvtpd_ps(_mm256_sub_pd(high, _mm256_loadu_pd(k + 4)));
    return _mm256_set_m128(b, a);
  }
};

// Eight rows of one length as columns, padded with −inf to a multiple of eight.
struct Columns {
  int64_t n, padded;
  double k64[8];
  __m256 k, temperature;  // a lane per row
  __m256 x[khot::kShort];

  // Calls visit(block) for each eight columns while they are at hand. All rows have a mask, or none.
  template <class Visit> Columns(const Row<float>* rows, Visit visit) : n(rows->n), padded((n + 7) & ~(int64_t)7) {
    alignas(32) float ks[8], temperatures[8];
    const float* from[8];  // locals: what is stored might alias the rows
    for (int r = 0; r < 8; ++r) {
      from[r] = rows[r].x;
      k64[r] = rows[r].k;
      ks[r] = (float)rows[r].k;
      temperatures[r] = (float)rows[r].temperature;
    }
    k = Avx2Float::load(ks);
    temperature = Avx2Float::load(temperatures);
    const bool is_masked = rows->mask != nullptr;
    const int64_t length = n;
    int64_t j = 0;
    do {  // n ≥ 1
      __m256* block = x + j;
      if (!is_masked && j + 8 <= length) {
        for (int r = 0; r < 8; ++r) block[r] = Avx2Float::load(from[r] + j);
      } else {
        for (int r = 0; r < 8; ++r) block[r] = part(rows[r], j);
      }
      transpose(block);
      visit(block);
    } while ((j += 8) < length);
  }

  // Writes columns to the rows whose bit is set in `which`; transposes `y` in place.
  void store(unsigned which, __m256* y, float* const* out) const {
    for (int64_t j = 0; j < padded; j += 8) {
      transpose(y + j);
      for (int r = 0; r < 8; ++r) {
        if (!(which >> r & 1)) continue;
        if (j + 8 <= n) {
          Avx2Float::store(out[r] + j, y[j + r]);
        } else {
          float rest[8];
          Avx2Float::store(rest, y[j + r]);
          for (int64_t i = 0; j + i < n; ++i) out[r][j + i] = rest[i];
        }
      }
    }
  }

 private:
  __m256 part(const Row<float>& row, int64_t j) const {
    const float* from = row.x + j;
    const uint8_t* mask = row.mask ? row.mask + j * row.mask_stride : nullptr;
    if (j + 8 <= n) return mask ? Avx2Float::load_masked(from, mask, row.mask_stride) : Avx2Float::load(from);
    float padding[8];
    for (int64_t i = 0; i < 8; ++i) {
      const bool is_allowed = j + i < n && (!mask || mask[i * row.mask_stride]);
      padding[i] = is_allowed ? from[i] : -std::numeric_limits<float>::infinity();
    }
    return Avx2Float::load(padding);
  }
};

}  // namespace
#endif
