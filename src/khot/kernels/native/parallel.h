// Splitting one row over threads without changing a bit of its sums.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t kChunk = 16384;

// Calls body(begin, end, part) for chunks of [0, n) and adds the parts to `sums` in the order of the chunks.
template <int Count, class Body> inline void for_chunks(int64_t n, int threads, double* sums, Body body) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  double* parts = nullptr;
  if (threads > 1 && chunks > 1) parts = static_cast<double*>(std::malloc((size_t)chunks * Count * sizeof(double)));
  if (!parts) {
    for (int64_t c = 0; c < chunks; ++c) {
      double part[Count];
      const int64_t begin = c * kChunk, end = begin + kChunk < n ? begin + kChunk : n;
      body(begin, end, part);
      for (int s = 0; s < Count; ++s) sums[s] += part[s];
    }
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = c * kChunk, end = begin + kChunk < n ? begin + kChunk : n;
    body(begin, end, parts + c * Count);
  }
  for (int64_t c = 0; c < chunks; ++c)
    for (int s = 0; s < Count; ++s) sums[s] += parts[c * Count + s];
  std::free(parts);
}

}  // namespace
