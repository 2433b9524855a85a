// Sharing rows out to threads, and splitting one without changing a bit of its sums.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t kChunk = 16384;
constexpr int64_t kSplit = 65536;     // from this length on, one row is worth splitting
constexpr int64_t kParallel = 16384;  // from so many scores on, several threads are worth waking

// Calls body(row, threads_for_it) for each row: rows side by side if there are enough, else one after another, each
// split. A region inside another, even one of a single thread, would have to start threads of its own.
template <class Body> void for_rows(int64_t rows, int64_t n, int threads, Body body) {
  const bool split = rows < threads && n >= kSplit;
  if (split || threads == 1 || rows == 1 || rows * n < kParallel) {
    for (int64_t r = 0; r < rows; ++r) body(r, split ? threads : 1);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1 + rows / (64 * (int64_t)threads)) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) body(r, 1);
}

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
