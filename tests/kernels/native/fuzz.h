// What all parts of the fuzz program share: memory that may be refused, and random numbers of any bits.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "khot.h"

// The library asks for memory with `new (std::nothrow)`: here it gets none while this is set.
static bool no_memory = false;
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return no_memory ? nullptr : std::malloc(size); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Rng = std::mt19937_64;

template <class T> constexpr int32_t dtype_of() { return sizeof(T) == 4 ? KHOT_FLOAT : KHOT_DOUBLE; }

template <class T> T any_bits(Rng& rng) {
  T v;
  const uint64_t bits = rng();
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

template <class T> void fill(Rng& rng, std::vector<T>& x) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int kind = (int)(rng() % 10);
  const double scale = std::pow(10, 8 * uniform(rng) - 4);
  for (auto& v : x) switch (kind) {
      case 0: v = any_bits<T>(rng); break;                                       // NaN, inf, denormals and all
      case 1: v = (T)(scale * std::tan(3.14159 * (uniform(rng) - 0.5))); break;  // heavy tails
      case 2: v = (T)std::floor(4 * uniform(rng)); break;                        // ties
      case 3: v = (T)scale; break;                                               // all equal
      case 4: v = uniform(rng) < 0.1 ? std::numeric_limits<T>::infinity() : (T)normal(rng); break;
      case 5: v = uniform(rng) < 0.5 ? -std::numeric_limits<T>::infinity() : (T)normal(rng); break;
      case 6: v = (T)(1000 + scale * normal(rng)); break;
      case 7: v = (T)(normal(rng) * std::numeric_limits<T>::min()); break;  // denormals
      case 8: v = uniform(rng) < 0.02 ? std::numeric_limits<T>::quiet_NaN() : (T)normal(rng); break;
      default: v = (T)(scale * normal(rng));
    }
}

// What the row must give: the sum, or NaN.
template <class T> double expected(const T* x, const uint8_t* mask, int64_t stride, int64_t n, double k, double t) {
  int64_t allowed = 0;
  bool nan = !(t > 0);
  for (int64_t i = 0; i < n; ++i) {
    if (mask && !mask[i * stride]) continue;
    nan |= std::isnan(x[i]);
    allowed += x[i] > -std::numeric_limits<T>::infinity();
  }
  return nan || !(k >= 0 && k <= (double)allowed) ? std::nan("") : k;
}

}  // namespace
