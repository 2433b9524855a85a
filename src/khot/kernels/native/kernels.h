// What one build of the kernels offers; the dispatcher fills a table per instruction set.
#pragma once

#include <cstdint>

namespace khot {

enum Cdf { kLogistic, kLaplace, kEuclidean, kCdfs };
constexpr int64_t kShort = 256;  // the longest row that `eight` takes

template <class T> struct Kernels {
  // One row of a soft top-k, by cdf. `mask` may be null; `threads` > 1 splits the row.
  void (*row[kCdfs])(const T* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, double temperature, int threads, T* y);
  // Eight short rows of σ_k at once, or null; a bit set in the result is a row that is left to `row`.
  unsigned (*eight)(const T* x, const uint8_t* mask, int64_t mask_row_stride, int64_t mask_stride, int64_t n, const double* k,
                    int64_t k_stride, const double* temperature, int64_t temperature_stride, T* p);
  // z = (x − τ)/T of one row; false if it is left to another method.
  bool (*margin)(const T* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, double temperature, int threads, T* z);
  // Ones at the k greatest.
  void (*hard)(const T* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, int threads, T* out);
  // The derivative of one row, by cdf: dx (n); returns dk.
  double (*pull[kCdfs])(const T* y, const T* g, int64_t n, double temperature, int threads, T* dx);
};

extern const Kernels<float> portable_float;
extern const Kernels<double> portable_double;
#ifdef KHOT_X86
extern const Kernels<float> avx2_float;
extern const Kernels<double> avx2_double;
#endif

}  // namespace khot
