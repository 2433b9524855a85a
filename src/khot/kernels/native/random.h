// What samplers draw with: many numbers of words.h, and random orders. A twin of _math/noise.py, to the last bit. For
// sampling.cpp alone, which is compiled once; GCC on Linux makes wider versions of the loops that are
// marked for it, and the loader of the program chooses between them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "words.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && __GNUC__ >= 12
#define KHOT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KHOT_CLONES
#endif

namespace {

// The key of draw d of a row; both draws of a pair have the same.
inline uint64_t row_key(int64_t seed, int64_t d, int64_t rows, int64_t row, bool is_paired) {
  return word_at((uint64_t)seed, (is_paired ? d / 2 : d) * rows + row);
}

// Calls body(part, begin, end) for the parts of [0, n), side by side if there are threads: at most kMostParts of a power
// of two of items. Returns log2 of the items of a part.
constexpr int64_t kMostParts = 64;
inline int part_bits(int64_t n) { return std::max(bit_length((uint64_t)(n - 1) / kMostParts), 14); }
template <class Body> void for_parts(int64_t n, int threads, Body body) {
  const int bits = part_bits(n);
  const int64_t parts = (n + ((int64_t)1 << bits) - 1) >> bits;
  const auto call = [&](int64_t part) { body(part, part << bits, std::min(n, (part + 1) << bits)); };
  if (threads == 1) {
    for (int64_t part = 0; part < parts; ++part) call(part);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t part = 0; part < parts; ++part) call(part);
}

// ── random orders ────────────────────────────────────────────────────────────────────────────────────────────────────
constexpr int64_t kSorted = 512;  // an order of so many items is sorted words; a longer one is a bijection
constexpr int64_t kBlock = 4096;  // leaves that are done at once, a power of two
constexpr int kBlockBits = 12, kRounds = 6;

// Words of the key sorted as signed numbers, their lowest bits replaced by the index. Buckets of one or two leave little
// to sort.
void sorted_order(uint64_t key, int64_t n, int64_t* items) {
  const uint64_t low = ((uint64_t)1 << bit_length((uint64_t)std::max<int64_t>(n - 1, 1))) - 1;
  const int bits = bit_length((uint64_t)n), shift = 64 - bits;
  uint64_t words[kSorted], sorted[kSorted];
  int32_t ends[2 * kSorted + 1] = {0};
  for (int64_t i = 0; i < n; ++i) {
    words[i] = ((word_at(key, i) & ~low) | (uint64_t)i) ^ (uint64_t)1 << 63;
    ++ends[(words[i] >> shift) + 1];
  }
  for (int b = 0; b < 1 << bits; ++b) ends[b + 1] += ends[b];
  for (int64_t i = 0; i < n; ++i) sorted[ends[words[i] >> shift]++] = words[i];
  for (int64_t i = 1; i < n; ++i) {
    const uint64_t word = sorted[i];
    int64_t j = i;
    for (; j > 0 && sorted[j - 1] > word; --j) sorted[j] = sorted[j - 1];
    sorted[j] = word;
  }
  for (int64_t i = 0; i < n; ++i) items[i] = (int64_t)(sorted[i] & low);
}

// A bijection of [0, 2^bits): in each round it adds, multiplies by an odd number, and folds the upper half on the lower.
struct Rounds {
  uint32_t add[kRounds], times[kRounds];
  uint64_t mask;
  int fold;
  Rounds(uint64_t key, int64_t n) {
    const int bits = bit_length((uint64_t)(n - 1));
    mask = ((uint64_t)1 << bits) - 1;
    fold = (bits + 1) / 2;
    for (int r = 0; r < kRounds; ++r) {
      const uint64_t word = word_at(key, r);
      add[r] = (uint32_t)word;
      times[r] = (uint32_t)(word >> 32) | 1;
    }
  }
  template <class U> U operator()(U x) const {
    for (int r = 0; r < kRounds; ++r) {
      x = (U)((x + add[r]) * times[r] & (U)mask);
      x ^= x >> fold;
    }
    return x;
  }
};

KHOT_CLONES void rounds_of(const Rounds& rounds, int64_t begin, int64_t count, uint32_t* out) {
  const Rounds of = rounds;  // a copy that nothing else can change, to be kept in registers
  for (int64_t i = 0; i < count; ++i) out[i] = of((uint32_t)(begin + i));
}

// The items at the places from `begin` on of a random order of n > kSorted: where the bijection leaves [0, n), it is
// followed until it comes back.
void shuffled_order(const Rounds& rounds, int64_t n, int64_t begin, int64_t count, int64_t* items) {
  const bool is_long = rounds.mask > UINT32_MAX;
  uint32_t first[kBlock];
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t some = std::min(count - done, kBlock);
    if (!is_long) rounds_of(rounds, begin + done, some, first);
    for (int64_t i = 0; i < some; ++i) {
      uint64_t x = is_long ? rounds((uint64_t)(begin + done + i)) : first[i];
      while (x >= (uint64_t)n) x = is_long ? rounds(x) : rounds((uint32_t)x);
      items[done + i] = (int64_t)x;
    }
  }
}

KHOT_CLONES void uniforms(uint64_t key, int64_t begin, int64_t end, double* out) {
  for (int64_t i = begin; i < end; ++i) out[i] = unit(word_at(key, i));
}

}  // namespace
