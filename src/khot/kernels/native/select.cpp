#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernels.h"

namespace khot {
namespace {

template <class T> void nth_of(T* values, int64_t m, int64_t r, int64_t s, T* value_r, T* value_s) {
  std::nth_element(values, values + (r - 1), values + m, std::greater<T>());
  *value_r = values[r - 1];
  *value_s = s == r ? *value_r : *std::max_element(values + r, values + m);
}

}  // namespace

void nth(float* values, int64_t m, int64_t r, int64_t s, float* value_r, float* value_s) {
  nth_of(values, m, r, s, value_r, value_s);
}
void nth(double* values, int64_t m, int64_t r, int64_t s, double* value_r, double* value_s) {
  nth_of(values, m, r, s, value_r, value_s);
}

void sort_falling(Cell* cells, int64_t m) {
  std::sort(cells, cells + m, [](const Cell& a, const Cell& b) { return a.mass > b.mass; });
}
void part_falling(Key* keys, int64_t middle, int64_t m) {
  std::nth_element(keys, keys + middle, keys + m, [](const Key& a, const Key& b) { return a.mass > b.mass; });
}

}  // namespace khot
