// Words of a counter, and numbers of [0, 1) from them. A twin of _math/noise.py, to the last bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

inline uint64_t word_at(uint64_t key, int64_t place) { return mixed(key + (uint64_t)(place + 1) * kGolden); }
inline uint64_t stream_key(uint64_t seed, uint64_t stream) { return mixed(seed ^ stream * kGolden); }

// A double from the bits of one that is known, and the other way.
inline double number_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A word as a number, rounded once. Vectors of older processors convert no integers of 64 bits: both halves become the
// last digits of a double.
inline double as_number(uint64_t word) {
  const double low = number_of((word & 0xFFFFFFFFu) | bits_of(0x1p52)), high = number_of((word >> 32) | bits_of(0x1p84));
  return (high - (0x1p84 + 0x1p52)) + low;
}

// The upper 53 bits as a number of [0, 1).
inline double unit(uint64_t word) { return as_number(word >> 11) * 0x1p-53; }

inline int bit_length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }

}  // namespace
