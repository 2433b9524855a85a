// The kernels for the machine, and a soft top-k and its derivative over rows that threads share: for the files with the
// entry points.
#pragma once

#if defined(__x86_64__)
#define KHOT_X86
#endif

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"
#include "parallel.h"

namespace khot {

// The widest path that this machine runs and that is not held back.
int widest();

}  // namespace khot

namespace {

#ifdef KHOT_X86
template <class T> const khot::Kernels<T>& kernels(int32_t path, const khot::Kernels<T>& portable,
                                                   const khot::Kernels<T>& avx2, const khot::Kernels<T>& avx512) {
  const int best = khot::widest();
  path = path < best ? path : best;
  return path == KHOT_AVX512 ? avx512 : path == KHOT_AVX2 ? avx2 : portable;
}
const khot::Kernels<float>& kernels(int32_t path, float) {
  return kernels(path, khot::portable_float, khot::avx2_float, khot::avx512_float);
}
const khot::Kernels<double>& kernels(int32_t path, double) {
  return kernels(path, khot::portable_double, khot::avx2_double, khot::avx512_double);
}
#else
const khot::Kernels<float>& kernels(int32_t, float) { return khot::portable_float; }
const khot::Kernels<double>& kernels(int32_t, double) { return khot::portable_double; }
#endif

constexpr int64_t kPast = 2 << 20;    // bytes of a result that is more than what a core keeps for itself
constexpr int64_t kLarge = 16 << 20;  // bytes of a result that is much memory, and more than a cache keeps

template <class T> khot::Row<T> row_of(const khot_rows& rows, int64_t r, int threads) {
  khot::Row<T> row;
  row.x = static_cast<const T*>(rows.x) + r * rows.n;
  row.mask = rows.mask ? rows.mask + r * rows.mask_row_stride : nullptr;
  row.mask_stride = rows.mask_stride;
  row.n = rows.n;
  row.k = rows.k ? rows.k[r * rows.k_stride] : rows.k_of_all;
  row.temperature = rows.temperature ? rows.temperature[r * rows.temperature_stride] : rows.temperature_of_all;
  row.threads = threads;
  row.exponent = rows.exponent;
  row.kept = nullptr;
  row.costs = rows.costs ? static_cast<const T*>(rows.costs) + r * rows.costs_row_stride : nullptr;
  row.ahead = 0;
  row.is_sharp = false;
  row.goes_past = rows.rows * rows.n * (int64_t)sizeof(T) >= kPast;
  return row;
}

// Fills in row r, given the first one: most of short rows' fields are alike, and filling them in takes as long as a pass.
template <class T> void put_row(const khot_rows& rows, const khot::Row<T>& first, int64_t r, khot::Row<T>& row) {
  row = first;
  row.x += r * rows.n;
  if (rows.k) row.k = rows.k[r * rows.k_stride];
  if (rows.temperature) row.temperature = rows.temperature[r * rows.temperature_stride];
  if (rows.mask) row.mask += r * rows.mask_row_stride;
  if (rows.costs) row.costs += r * rows.costs_row_stride;
}

// Asks for large pages where a result is to be written to much memory, which may be new: a fault for each 4 KB of it takes
// longer than what is computed. Threads that first write to the same large page all clear it, and only one of them for
// good, so each is given its own before. Memory that is in use already does not change.
void expect(void* out, int64_t bytes, int threads) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t large = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(out) + large - 1) & -large;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(out) + (uintptr_t)bytes) & -large;
  if (bytes < kPast) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  if (bytes < kLarge || threads == 1) return;
  const uintptr_t pages = (end - begin) / large, count = (uintptr_t)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (uintptr_t t = 0; t < count; ++t) {
    constexpr int populate_write = 23;  // of Linux 5.14; others refuse it
    const uintptr_t from = begin + pages * t / count * large, to = begin + pages * (t + 1) / count * large;
    madvise(reinterpret_cast<void*>(from), to - from, populate_write);
  }
#else
  (void)out, (void)bytes, (void)threads;
#endif
}

// Copies to memory that is not read soon: it need not be fetched before it is written.
void stream(const void* from, int64_t bytes, void* to) {
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
#if defined(__SSE2__)
  const auto off = (int64_t)(-reinterpret_cast<uintptr_t>(to) & 63), head = off < bytes ? off : bytes;
  std::memcpy(target, source, (size_t)head);
  int64_t i = head;
  for (; i + 64 <= bytes; i += 64)
    for (int64_t j = i; j < i + 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + j)));
  std::memcpy(target + i, source + i, (size_t)(bytes - i));
  _mm_sfence();
#else
  std::memcpy(target, source, (size_t)bytes);
#endif
}

// Calls solve(to) for a row that goes to `out`, one of `rows`. If that is part of a large result, it is solved in memory
// that stays in the cache, as each pass reads it again, and streamed from there.
template <class T, class Solve> void solve_near(T* out, int64_t n, int64_t rows, Solve solve) {
  const bool is_large = rows * n * (int64_t)sizeof(T) >= kLarge && n > khot::kGrouped && n <= khot::kAhead;
  const std::unique_ptr<T[]> room(is_large ? new (std::nothrow) T[(size_t)n] : nullptr);
  solve(room ? room.get() : out);
  if (room) stream(room.get(), n * (int64_t)sizeof(T), out);
}

constexpr int64_t kBatch = 128;  // so many rows are solved together
constexpr int64_t kFewRows = 3;  // fewer are not worth their lanes

// σ_k of `count` ≤ kBatch rows from row `first` on: in groups the quick way, short ones that remain in groups the sure way,
// and what still remains one by one.
template <class T>
void topk_groups(const khot::Kernels<T>& table, const khot_rows& rows, int64_t first, int64_t count, T* y,
                 khot::Kept* kept) {
  khot::Row<T> batch[kBatch + khot::kMostRows];
  T* out[kBatch + khot::kMostRows];
  const auto one = row_of<T>(rows, 0, 1);
  for (int64_t i = 0; i < count; ++i) {
    put_row(rows, one, first + i, batch[i]);
    if (kept) batch[i].kept = kept + first + i;
    out[i] = y + (first + i) * rows.n;
  }
  // Solves the rows of the batch, and keeps those that are not.
  const int64_t group = table.group;
  const auto pass = [&](auto solve_group) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; i += group) {
      const int64_t rest = count - i;
      for (int64_t j = rest; j < group; ++j) batch[i + j] = batch[i], out[i + j] = out[i];  // a group is filled up
      const auto rows_here = (int)(rest < group ? rest : group);
      unsigned which = rest < kFewRows ? ~0u : solve_group(batch + i, rows_here, out + i);
      which &= (1u << rows_here) - 1;
      for (; which; which &= which - 1, ++left) {
        batch[left] = batch[i + __builtin_ctz(which)];
        batch[left].is_sharp = rest >= kFewRows;
        out[left] = out[i + __builtin_ctz(which)];
      }
    }
    count = left;
  };
  pass(table.quick_group);
  if (rows.n <= khot::kShort) pass(table.sure_group);
  for (int64_t i = 0; i < count; ++i) table.row[KHOT_SIGMOID](batch[i], out[i]);
}

// Multiples of a group, whatever the number of threads: the same rows come together, and give the same bits.
int64_t rows_at_once(int64_t group, int64_t n) {
  const int64_t fit = kParallel / n & -group;
  return fit < group ? group : fit < kBatch ? fit : kBatch;
}

// `kept`: one per row, or null.
template <class T> void topk(const khot_rows& rows, T* y, khot::Kept* kept = nullptr) {
  expect(y, rows.rows * rows.n * (int64_t)sizeof(T), rows.threads);
  const auto& table = kernels(rows.path, T());
  const int64_t n = rows.n;
  if (table.group && rows.cdf == KHOT_SIGMOID && n <= khot::kGrouped && rows.rows >= kFewRows) {
    const int64_t most = rows_at_once(table.group, n);
    return for_rows((rows.rows + most - 1) / most, most * n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * most, rest = rows.rows - first;
      topk_groups(table, rows, first, rest < most ? rest : most, y, kept);
    });
  }
  for_rows(rows.rows, n, rows.threads, [&](int64_t r, int share) {
    auto row = row_of<T>(rows, r, share);
    if (kept) row.kept = kept + r;
    if (r + 1 < rows.rows && n <= khot::kAhead) row.ahead = (int32_t)n;
    solve_near(y + r * n, n, rows.rows, [&](T* to) { table.row[rows.cdf](row, to); });
  });
}

template <class T> void pull(const khot_rows& rows, const T* g, T* dx, double* dk) {
  expect(dx, rows.rows * rows.n * (int64_t)sizeof(T), rows.threads);
  const auto& table = kernels(rows.path, T());
  if (table.group && rows.n <= khot::kShort) {
    const int64_t group = table.group;
    const auto one = row_of<T>(rows, 0, 1);
    return for_rows((rows.rows + group - 1) / group, group * rows.n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * group, count = rows.rows - first < group ? rows.rows - first : group;
      khot::Row<T> batch[khot::kMostRows];
      const T* from[khot::kMostRows];
      T* to[khot::kMostRows];
      double means[khot::kMostRows];
      for (int64_t i = 0; i < count; ++i) {
        put_row(rows, one, first + i, batch[i]);
        from[i] = g + (first + i) * rows.n;
        to[i] = dx + (first + i) * rows.n;
      }
      const auto kernel = (rows.costs ? table.cost_pull_short : table.pull_short)[rows.cdf];
      kernel(batch, (int)count, from, to, means);
      for (int64_t i = 0; dk && i < count; ++i) dk[first + i] = means[i];
    });
  }
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    const auto kernel = (rows.costs ? table.cost_pull : table.pull)[rows.cdf];
    const double mean = kernel(row_of<T>(rows, r, share), g + r * rows.n, dx + r * rows.n);
    if (dk) dk[r] = mean;
  });
}

}  // namespace
