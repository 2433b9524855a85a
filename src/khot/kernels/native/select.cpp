#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

namespace khot {
namespace {

constexpr int64_t kSample = 4096;
constexpr int64_t kMargin = 160;  // ranks in the sample: more than four standard deviations of a binomial count

template <class T> void select_directly(T* values, int64_t m, int64_t r, int64_t s, T* value_r, T* value_s) {
  std::nth_element(values, values + (r - 1), values + m, std::greater<T>());
  *value_r = values[r - 1];
  *value_s = s == r ? *value_r : *std::max_element(values + r, values + m);
}

// Brackets the two ranks between two order statistics of a sample, and selects among what lies between. False if it did not.
template <class T> bool select_by_sample(const T* values, int64_t m, int64_t r, int64_t s, T* value_r, T* value_s) {
  T sample[kSample];  // 32 KB at most
  for (int64_t i = 0; i < kSample; ++i) sample[i] = values[i * (m / kSample)];
  std::sort(sample, sample + kSample, std::greater<T>());
  const int64_t at = (int64_t)((double)r / (double)m * (double)kSample);
  if (at < kMargin || at + kMargin >= kSample) return false;
  const T high = sample[at - kMargin], low = sample[at + kMargin];

  int64_t above = 0, between = 0;
  for (int64_t i = 0; i < m; ++i) {
    above += values[i] > high;
    between += (values[i] <= high) & (values[i] >= low);
  }
  if (!(above < r && s <= above + between)) return false;
  if (high == low) {
    *value_r = *value_s = high;
    return true;
  }
  T* middle = static_cast<T*>(std::malloc((size_t)(between + 1) * sizeof(T)));
  if (!middle) return false;
  int64_t j = 0;
  for (int64_t i = 0; i < m; ++i) {
    middle[j] = values[i];
    j += (values[i] <= high) & (values[i] >= low);
  }
  select_directly(middle, between, r - above, s - above, value_r, value_s);
  std::free(middle);
  return true;
}

template <class T> void select_any(T* values, int64_t m, int64_t r, int64_t s, T* value_r, T* value_s) {
  if (m >= 8 * kSample && select_by_sample(values, m, r, s, value_r, value_s)) return;
  select_directly(values, m, r, s, value_r, value_s);
}

template <class T> void hard_any(const T* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, T* out) {
  const T low = -std::numeric_limits<T>::infinity();
  const auto at = [=](int64_t i) { return !mask || mask[i * mask_stride] ? x[i] : low; };
  int64_t possible = 0;
  bool fits = k >= 0 && k == std::floor(k);
  for (int64_t i = 0; i < n; ++i) {
    const T value = at(i);
    fits &= value == value;
    out[possible] = value;  // scratch, until the end
    possible += value > low;
  }
  if (!fits || k > (double)possible) {
    std::fill(out, out + n, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  T bound = low;
  int64_t ties = 0;
  if (k > 0) {
    const auto rank = (int64_t)k;
    select_any(out, possible, rank, rank, &bound, &bound);
    ties = rank;
    for (int64_t i = 0; i < n; ++i) ties -= at(i) > bound;
  }
  for (int64_t i = 0; i < n; ++i) {
    const T value = at(i);
    const bool is_tie = value == bound && ties > 0;
    ties -= is_tie;
    out[i] = k > 0 && (value > bound || is_tie) ? T(1) : T(0);
  }
}

}  // namespace

void select_ranks(float* values, int64_t m, int64_t r, int64_t s, float* value_r, float* value_s) {
  select_any(values, m, r, s, value_r, value_s);
}
void select_ranks(double* values, int64_t m, int64_t r, int64_t s, double* value_r, double* value_s) {
  select_any(values, m, r, s, value_r, value_s);
}

void hard_row(const float* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, float* out) {
  hard_any(x, mask, mask_stride, n, k, out);
}
void hard_row(const double* x, const uint8_t* mask, int64_t mask_stride, int64_t n, double k, double* out) {
  hard_any(x, mask, mask_stride, n, k, out);
}

}  // namespace khot
