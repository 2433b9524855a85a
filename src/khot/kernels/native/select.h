// Order statistics, compiled once for every machine: the standard algorithms must not be instantiated with wider instructions.
#pragma once

#include <cstdint>

namespace khot {

// The values of rank r and s (1 = greatest, r ≤ s ≤ r + 1) among values[0..m), which is reordered. No NaN.
void select_ranks(float* values, int64_t m, int64_t r, int64_t s, float* value_r, float* value_s);
void select_ranks(double* values, int64_t m, int64_t r, int64_t s, double* value_r, double* value_s);

// Ones at the k greatest allowed values, ties by lowest index; NaN throughout if that cannot be done. `mask` may be null.
void hard_row(const float* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, float* out);
void hard_row(const double* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, double* out);

}  // namespace khot
