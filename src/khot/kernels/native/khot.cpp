// The C interface: rows in, rows out, plain pointers. Loaded with ctypes; no torch or Python headers.
#if defined(__x86_64__)
#define KHOT_X86
#endif

#include "kernels.h"
#include "parallel.h"

namespace {

bool has_avx2() {
#ifdef KHOT_X86
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return yes;
#else
  return false;
#endif
}

template <class T> struct Table;
template <> struct Table<float> {
  static const khot::Kernels<float>& of(int path) {
#ifdef KHOT_X86
    if (path && has_avx2()) return khot::avx2_float;
#endif
    (void)path;
    return khot::portable_float;
  }
};
template <> struct Table<double> {
  static const khot::Kernels<double>& of(int path) {
#ifdef KHOT_X86
    if (path && has_avx2()) return khot::avx2_double;
#endif
    (void)path;
    return khot::portable_double;
  }
};

template <class T>
void topk(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const double* temperature,
          int64_t temperature_stride, const uint8_t* mask, int64_t mask_row_stride, int64_t mask_stride, int threads, int path, int cdf,
          T* p) {
  const auto& kernels = Table<T>::of(path);
  const auto mask_of = [&](int64_t r) { return mask ? mask + r * mask_row_stride : nullptr; };
  const auto solve = [&](int64_t r, int share) {
    kernels.row[cdf](x + r * n, mask_of(r), mask_stride, n, k[r * k_stride], temperature[r * temperature_stride], share, p + r * n);
  };
  const int64_t groups = kernels.eight && cdf == khot::kLogistic && n <= khot::kShort ? rows / 8 : 0;
  for_rows(groups, 8 * n, threads, [&](int64_t group, int) {
    const int64_t r = 8 * group;
    unsigned left = kernels.eight(x + r * n, mask_of(r), mask_row_stride, mask_stride, n, k + r * k_stride, k_stride,
                                  temperature + r * temperature_stride, temperature_stride, p + r * n);
    for (; left; left &= left - 1) solve(r + __builtin_ctz(left), 1);
  });
  for_rows(rows - 8 * groups, n, threads, [&](int64_t r, int share) { solve(8 * groups + r, share); });
}

template <class T>
void margin(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const double* temperature,
            int64_t temperature_stride, const uint8_t* mask, int64_t mask_row_stride, int64_t mask_stride, int threads, int path, T* z,
            uint8_t* is_left) {
  const auto& kernels = Table<T>::of(path);
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    is_left[r] = !kernels.margin(x + r * n, mask ? mask + r * mask_row_stride : nullptr, mask_stride, n, k[r * k_stride],
                                 temperature[r * temperature_stride], share, z + r * n);
  });
}

template <class T>
void pull(const T* p, const T* g, int64_t rows, int64_t n, const double* temperature, int64_t temperature_stride, int threads,
          int path, int cdf, T* dx, double* dk) {
  const auto& kernels = Table<T>::of(path);
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    const double mean = kernels.pull[cdf](p + r * n, g + r * n, n, temperature[r * temperature_stride], share, dx + r * n);
    if (dk) dk[r] = mean;
  });
}

template <class T>
void hard(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const uint8_t* mask, int64_t mask_row_stride,
          int64_t mask_stride, int threads, int path, T* out) {
  const auto& kernels = Table<T>::of(path);
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    kernels.hard(x + r * n, mask ? mask + r * mask_row_stride : nullptr, mask_stride, n, k[r * k_stride], share, out + r * n);
  });
}

}  // namespace

#define KHOT_API extern "C" __attribute__((visibility("default")))

// Bumped when a signature below changes, so that an old library is not called with new arguments.
KHOT_API int khot_abi() { return 5; }

// 1 if the wide path runs on this machine.
KHOT_API int khot_has_avx2() { return has_avx2(); }

#define KHOT_TOPK(NAME, T)                                                                                                \
  KHOT_API void NAME(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const double* temperature,    \
                     int64_t temperature_stride, const uint8_t* mask, int64_t mask_row_stride, int64_t mask_stride,        \
                     int threads, int path, int cdf, T* y) {                                                               \
    topk(x, rows, n, k, k_stride, temperature, temperature_stride, mask, mask_row_stride, mask_stride, threads, path, cdf, \
         y);                                                                                                               \
  }
KHOT_TOPK(khot_topk_float, float)
KHOT_TOPK(khot_topk_double, double)

// As above for z = (x − τ)/T; is_left[r] is 1 for a row that is not written, and is left to another method.
#define KHOT_MARGIN(NAME, T)                                                                                             \
  KHOT_API void NAME(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const double* temperature,    \
                     int64_t temperature_stride, const uint8_t* mask, int64_t mask_row_stride, int64_t mask_stride,        \
                     int threads, int path, T* z, uint8_t* is_left) {                                                      \
    margin(x, rows, n, k, k_stride, temperature, temperature_stride, mask, mask_row_stride, mask_stride, threads, path, z, \
           is_left);                                                                                                       \
  }
KHOT_MARGIN(khot_sigmoid_margin_float, float)
KHOT_MARGIN(khot_sigmoid_margin_double, double)

#define KHOT_PULL(NAME, T)                                                                                         \
  KHOT_API void NAME(const T* p, const T* g, int64_t rows, int64_t n, const double* temperature,                     \
                     int64_t temperature_stride, int threads, int path, int cdf, T* dx, double* dk) {                \
    pull(p, g, rows, n, temperature, temperature_stride, threads, path, cdf, dx, dk);                                \
  }
KHOT_PULL(khot_topk_pull_float, float)
KHOT_PULL(khot_topk_pull_double, double)

#define KHOT_HARD(NAME, T)                                                                                             \
  KHOT_API void NAME(const T* x, int64_t rows, int64_t n, const double* k, int64_t k_stride, const uint8_t* mask,        \
                     int64_t mask_row_stride, int64_t mask_stride, int threads, int path, T* out) {                      \
    hard(x, rows, n, k, k_stride, mask, mask_row_stride, mask_stride, threads, path, out);                                     \
  }
KHOT_HARD(khot_hard_topk_float, float)
KHOT_HARD(khot_hard_topk_double, double)
