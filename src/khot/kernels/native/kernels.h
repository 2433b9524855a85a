// What one build of the kernels offers; the dispatcher fills a table per instruction set.
#pragma once

#include <cstdint>

#include "khot.h"

namespace khot {

constexpr int64_t kShort = 256, kGrouped = 4096;  // the longest rows for `sure_group`, and for `quick_group`
constexpr int kMostRows = 16;  // of a group

template <class T> struct Row {
  const T* x;
  const uint8_t* mask;  // null: all allowed
  int64_t mask_stride, n;
  double k, temperature;
  int threads;  // to split this one row over
};

// A signal that is to be coded, and where its code goes.
template <class T> struct Signal {
  const T* gram;  // n × n
  int64_t n, slots, count;
  double square, enough, noise;
  T* alpha;        // (n), overwritten
  int64_t* atoms;  // (slots)
  T* coefs;        // (slots), zeros
  uint8_t* is_close;
};

// What `pursue` works with, for `slots` atoms.
template <class T> struct Room {
  double *inverse, *lower;  // slots × slots, and slots
  const T** rows;
  T* by;
};

template <class T> struct Kernels {
  // One row of a soft top-k, by cdf; null: there is no such kernel.
  void (*row[KHOT_CDFS])(const Row<T>& row, T* y);
  // Up to `group` rows of σ_k at once, all of one length: the quick way for up to kGrouped scores, and the sure way for up to
  // kShort, whose results do not depend on which rows come together. There are `group` rows, of which the first `count`
  // differ. A bit set in the result is a row that is not solved. 0 and null: there is no such way.
  int group;
  unsigned (*quick_group)(const Row<T>* rows, int count, T* const* y);
  unsigned (*sure_group)(const Row<T>* rows, int count, T* const* y);
  // z = (x − τ)/T of one row; false if it is left to another method.
  bool (*margin)(const Row<T>& row, T* z);
  // Ones at the k largest.
  void (*hard)(const Row<T>& row, T* out);
  // The derivative of one row, by cdf: row.x is y, dx (n); returns dk.
  double (*pull[KHOT_CDFS])(const Row<T>& row, const T* g, T* dx);
  // The same of `count` ≤ `group` rows of up to kShort entries; dk has room for a group. Null: there is no such way.
  void (*pull_short[KHOT_CDFS])(const Row<T>* rows, int count, const T* const* g, T* const* dx, double* dk);
  // Orthogonal matching pursuit of one signal; returns how many atoms it took.
  int64_t (*pursue)(const Signal<T>& signal, const Room<T>& room);
  // Statistical top-k of one row, whose k is the multiplier of the deviation; returns the threshold.
  double (*statistical)(const Row<T>& row, double smooth, T* y);
};

extern const Kernels<float> portable_float;
extern const Kernels<double> portable_double;
#ifdef KHOT_X86
extern const Kernels<float> avx2_float;
extern const Kernels<double> avx2_double;
extern const Kernels<float> avx512_float;
extern const Kernels<double> avx512_double;
#endif

}  // namespace khot
