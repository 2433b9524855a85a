// The entry points over rows: they choose the kernels for the machine and share rows out to threads.
#if defined(__x86_64__)
#define KHOT_X86
#endif

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "kernels.h"
#include "parallel.h"

#ifndef KHOT_ABI
#define KHOT_ABI 0  // a build for the fuzz program, which Python refuses
#endif

namespace {

std::atomic<int> held{KHOT_AVX512};  // no wider path than this

// The widest path that this machine runs and that is not held back.
int widest() {
#ifdef KHOT_X86
  static const int best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
                              ? KHOT_AVX512
                          : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? KHOT_AVX2
                                                                                           : KHOT_PORTABLE;
  return best < held ? best : held.load();
#else
  return KHOT_PORTABLE;
#endif
}

#ifdef KHOT_X86
template <class T> const khot::Kernels<T>& kernels(int32_t path, const khot::Kernels<T>& portable,
                                                   const khot::Kernels<T>& avx2, const khot::Kernels<T>& avx512) {
  const int best = widest();
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

template <class T> khot::Row<T> row_of(const khot_rows& rows, int64_t r, int threads) {
  return {static_cast<const T*>(rows.x) + r * rows.n,
          rows.mask ? rows.mask + r * rows.mask_row_stride : nullptr,
          rows.mask_stride,
          rows.n,
          rows.k ? rows.k[r * rows.k_stride] : rows.k_of_all,
          rows.temperature ? rows.temperature[r * rows.temperature_stride] : rows.temperature_of_all,
          threads,
          rows.exponent};
}

// Asks for large pages where a result is to be written to much memory, which may be new: a fault for each 4 KB of it takes
// longer than what is computed. Memory that is in use already does not change.
void expect(void* out, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t large = 2 << 20, least = 16 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(out) + large - 1) & -large;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(out) + (uintptr_t)bytes) & -large;
  if ((uintptr_t)bytes >= least) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)out, (void)bytes;
#endif
}

constexpr int64_t kBatch = 128;  // so many rows are solved together
constexpr int64_t kFewRows = 3;  // fewer are not worth their lanes

// σ_k of `count` ≤ kBatch rows from row `first` on: in groups the quick way, short ones that remain in groups the sure way,
// and what still remains one by one.
template <class T>
void topk_groups(const khot::Kernels<T>& table, const khot_rows& rows, int64_t first, int64_t count, T* y) {
  khot::Row<T> batch[kBatch + khot::kMostRows];
  T* out[kBatch + khot::kMostRows];
  for (int64_t i = 0; i < count; ++i) {
    batch[i] = row_of<T>(rows, first + i, 1);
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

template <class T> void topk(const khot_rows& rows, T* y) {
  expect(y, rows.rows * rows.n * (int64_t)sizeof(T));
  const auto& table = kernels(rows.path, T());
  const int64_t n = rows.n;
  if (table.group && rows.cdf == KHOT_SIGMOID && n <= khot::kGrouped && rows.rows >= kFewRows) {
    const int64_t most = rows_at_once(table.group, n);
    return for_rows((rows.rows + most - 1) / most, most * n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * most, rest = rows.rows - first;
      topk_groups(table, rows, first, rest < most ? rest : most, y);
    });
  }
  for_rows(rows.rows, n, rows.threads,
           [&](int64_t r, int share) { table.row[rows.cdf](row_of<T>(rows, r, share), y + r * n); });
}

template <class T> void margin(const khot_rows& rows, T* z, uint8_t* is_left) {
  const auto& table = kernels(rows.path, T());
  // The narrow path does not fuse multiplications and additions, and its floats lose a digit that the sum needs.
  const bool is_narrow = static_cast<const void*>(&table) == &khot::portable_float;
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    is_left[r] = is_narrow || !table.margin(row_of<T>(rows, r, share), z + r * rows.n);
  });
}

template <class T> void hard(const khot_rows& rows, T* out) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads,
           [&](int64_t r, int share) { table.hard(row_of<T>(rows, r, share), out + r * rows.n); });
}

template <class T> void pull(const khot_rows& rows, const T* g, T* dx, double* dk) {
  expect(dx, rows.rows * rows.n * (int64_t)sizeof(T));
  const auto& table = kernels(rows.path, T());
  if (table.group && rows.n <= khot::kShort) {
    const int64_t group = table.group;
    return for_rows((rows.rows + group - 1) / group, group * rows.n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * group, count = rows.rows - first < group ? rows.rows - first : group;
      khot::Row<T> batch[khot::kMostRows];
      const T* from[khot::kMostRows];
      T* to[khot::kMostRows];
      double means[khot::kMostRows];
      for (int64_t i = 0; i < count; ++i) {
        batch[i] = row_of<T>(rows, first + i, 1);
        from[i] = g + (first + i) * rows.n;
        to[i] = dx + (first + i) * rows.n;
      }
      table.pull_short[rows.cdf](batch, (int)count, from, to, means);
      for (int64_t i = 0; dk && i < count; ++i) dk[first + i] = means[i];
    });
  }
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    const double mean = table.pull[rows.cdf](row_of<T>(rows, r, share), g + r * rows.n, dx + r * rows.n);
    if (dk) dk[r] = mean;
  });
}

template <class T> void sums_at(const khot_rows& rows, const double* anchor, const double* shift, double* sums) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    table.sums_at[rows.cdf](row_of<T>(rows, r, share), {(T)anchor[r], (T)shift[r]}, sums + 5 * r);
  });
}

template <class T>
void value_at(const khot_rows& rows, const double* anchor, const double* shift, const double* give, T* y) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    table.value_at[rows.cdf](row_of<T>(rows, r, share), {(T)anchor[r], (T)shift[r]}, (T)give[r], y + r * rows.n);
  });
}

// Calls body(some, room) for rows of 16 bits, a few at a time and as floats. It writes as many floats to the room, which are
// rounded to `out`; or if there are `more` numbers, which stand behind the room, it replaces those by the result.
template <class Body> int in_floats(const khot_rows& rows, const uint16_t* more, uint16_t* out, Body body) {
  expect(out, rows.rows * rows.n * (int64_t)sizeof(uint16_t));
  const auto& table = kernels(rows.path, float());
  const int64_t n = rows.n, most = n <= khot::kGrouped ? rows_at_once(table.group, n) : 1;
  std::atomic<int> status{KHOT_OK};
  for_rows((rows.rows + most - 1) / most, most * n, rows.threads, [&](int64_t b, int share) {
    const int64_t first = b * most, count = rows.rows - first < most ? rows.rows - first : most, size = count * n;
    const std::unique_ptr<float[]> room(new (std::nothrow) float[(size_t)(size * (more ? 3 : 2))]);
    if (!room) {
      status = KHOT_NO_MEMORY;
      return;
    }
    khot_rows some = rows;
    some.x = room.get();
    some.rows = count;
    some.k += some.k ? first * rows.k_stride : 0;
    some.temperature += some.temperature ? first * rows.temperature_stride : 0;
    some.mask += some.mask ? first * rows.mask_row_stride : 0;
    some.dtype = KHOT_FLOAT;
    some.threads = share;
    table.widen(rows.dtype, static_cast<const uint16_t*>(rows.x) + first * n, size, room.get());
    if (more) table.widen(rows.dtype, more + first * n, size, room.get() + 2 * size);
    body(some, room.get() + size);
    table.narrow(rows.dtype, room.get() + size * (more ? 2 : 1), size, out + first * n);
  });
  return status;
}

template <class T> void statistical(const khot_rows& rows, double smooth, bool is_exact, T* y, double* theta) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    theta[r] = table.statistical(row_of<T>(rows, r, share), smooth, is_exact, y ? y + r * rows.n : nullptr);
  });
}

constexpr int64_t kSignals = 32;  // so many are coded in the same room

template <class T>
int pursue(const khot_signals& s, T* alpha, int64_t* atoms, T* coefs, int64_t* taken, uint8_t* is_close) {
  const auto& table = kernels(s.path, T());
  const auto slots = (size_t)s.slots;
  std::atomic<int> status{KHOT_OK};
  for_rows((s.rows + kSignals - 1) / kSignals, kSignals * s.n, s.threads, [&](int64_t block, int) {
    const std::unique_ptr<double[]> numbers(new (std::nothrow) double[slots * slots + slots]);
    const std::unique_ptr<const T*[]> rows(new (std::nothrow) const T*[slots]);
    const std::unique_ptr<T[]> by(new (std::nothrow) T[slots]);
    if (!numbers || !rows || !by) {
      status = KHOT_NO_MEMORY;
      return;
    }
    const khot::Room<T> room = {numbers.get(), numbers.get() + slots * slots, rows.get(), by.get()};
    for (int64_t r = block * kSignals; r < (block + 1) * kSignals && r < s.rows; ++r)
      taken[r] = table.pursue({static_cast<const T*>(s.gram), s.n, s.slots, s.counts[r], s.square[r], s.enough[r],
                               s.noise[r], alpha + r * s.n, atoms + r * s.slots, coefs + r * s.slots, is_close + r},
                              room);
  });
  return status;
}

template <class T> int attend(const khot_cells& s, T* output, int64_t* k, double* bound, int64_t* scored,
                              uint8_t* is_refused, uint8_t* head) {
  const auto& table = kernels(s.path, T());
  const auto of = [](const void* all, int64_t i) { return static_cast<const T*>(all) + i; };
  std::atomic<int> status{KHOT_OK};
  for_rows(s.heads * s.rows, s.used * s.d, s.threads, [&](int64_t r, int) {
    const auto used = (size_t)s.used;
    const std::unique_ptr<khot::Cell[]> cells(new (std::nothrow) khot::Cell[used]);
    const std::unique_ptr<double[]> rest(new (std::nothrow) double[used + 1]);
    const std::unique_ptr<khot::Key[]> keys(new (std::nothrow) khot::Key[used * (size_t)s.size]);
    if (!cells || !rest || !keys) {
      status = KHOT_NO_MEMORY;
      return;
    }
    const int64_t b = r / s.rows, c = b * s.room;
    const auto found = table.attend(
        {of(s.keys, c * s.size * s.d), of(s.centre, c * s.d), of(s.radius, c), of(s.share, c),
         s.values ? of(s.values, b * s.value_head_stride) : nullptr, s.index + c * s.size, s.counts + c, s.used,
         s.bounded, s.size, s.d, s.e, s.value_stride, s.limit},
        {of(s.q, r * s.d), s.mask ? s.mask + r * s.n : nullptr, s.epsilon[r], s.slack * (double)*of(s.largest, b)},
        {cells.get(), rest.get(), keys.get()}, output ? output + r * s.e : nullptr, head ? head + r * s.n : nullptr);
    k[r] = found.k;
    scored[r] = found.scored;
    bound[r] = found.bound;
    is_refused[r] = found.is_refused;
  });
  return status;
}

}  // namespace

uint32_t khot_abi() noexcept { return KHOT_ABI; }

int khot_path() noexcept { return widest(); }

void khot_hold(int path) noexcept { held = path; }

void khot_topk(const khot_rows* rows, void* y) noexcept {
  if (rows->dtype == KHOT_FLOAT) return topk(*rows, static_cast<float*>(y));
  topk(*rows, static_cast<double*>(y));
}

void khot_sigmoid_margin(const khot_rows* rows, void* z, uint8_t* is_left) noexcept {
  if (rows->dtype == KHOT_FLOAT) return margin(*rows, static_cast<float*>(z), is_left);
  margin(*rows, static_cast<double*>(z), is_left);
}

void khot_hard_topk(const khot_rows* rows, void* out) noexcept {
  if (rows->dtype == KHOT_FLOAT) return hard(*rows, static_cast<float*>(out));
  hard(*rows, static_cast<double*>(out));
}

void khot_topk_pull(const khot_rows* rows, const void* g, void* dx, double* dk) noexcept {
  if (rows->dtype == KHOT_FLOAT) return pull(*rows, static_cast<const float*>(g), static_cast<float*>(dx), dk);
  pull(*rows, static_cast<const double*>(g), static_cast<double*>(dx), dk);
}

void khot_sums_at(const khot_rows* rows, const double* anchor, const double* shift, double* sums) noexcept {
  if (rows->dtype == KHOT_FLOAT) return sums_at<float>(*rows, anchor, shift, sums);
  sums_at<double>(*rows, anchor, shift, sums);
}

void khot_value_at(const khot_rows* rows, const double* anchor, const double* shift, const double* give,
                   void* y) noexcept {
  if (rows->dtype == KHOT_FLOAT) return value_at(*rows, anchor, shift, give, static_cast<float*>(y));
  value_at(*rows, anchor, shift, give, static_cast<double*>(y));
}

int khot_half_topk(const khot_rows* rows, void* y) noexcept {
  return in_floats(*rows, nullptr, static_cast<uint16_t*>(y), [](const khot_rows& some, float* room) { topk(some, room); });
}

int khot_half_pull(const khot_rows* rows, const void* g, void* dx) noexcept {
  return in_floats(*rows, static_cast<const uint16_t*>(g), static_cast<uint16_t*>(dx), [](khot_rows some, float* room) {
    float* cotangent = room + some.rows * some.n;
    topk(some, room);
    some.x = room;
    pull(some, cotangent, cotangent, nullptr);
  });
}

void khot_statistical(const khot_rows* rows, double smooth, int is_exact, void* y, double* theta) noexcept {
  if (rows->dtype == KHOT_FLOAT) return statistical(*rows, smooth, is_exact, static_cast<float*>(y), theta);
  statistical(*rows, smooth, is_exact, static_cast<double*>(y), theta);
}

void khot_log_sigmoid(const khot_rows* rows, void* y, void* scratch, double* anchor, double* shift,
                      uint8_t* is_left) noexcept {
  const auto& table = kernels(rows->path, 0.0f);
  for_rows(rows->rows, rows->n, rows->threads, [&](int64_t r, int share) {
    khot::Root root = {};
    const auto row = row_of<float>(*rows, r, share);
    float* to = static_cast<float*>(y ? y : scratch) + r * rows->n;
    is_left[r] = !(y ? table.log(row, to, &root) : table.root(row, to, &root));
    anchor[r] = root.anchor, shift[r] = root.shift;
  });
}

void khot_log_sigmoid_pull(const khot_rows* rows, const double* anchor, const double* shift, const void* g,
                           const double* mass, void* dx, uint8_t* is_left) noexcept {
  const auto& table = kernels(rows->path, 0.0f);
  const auto* from = static_cast<const float*>(g);
  for_rows(rows->rows, rows->n, rows->threads, [&](int64_t r, int share) {
    is_left[r] = !table.log_pull(row_of<float>(*rows, r, share), {anchor[r], shift[r]}, g ? from + r * rows->n : nullptr,
                                 g ? 0 : mass[r], static_cast<float*>(dx) + r * rows->n);
  });
}

void khot_cross_entropy(const khot_rows* rows, const void* target, double* loss, void* dx, uint8_t* is_left) noexcept {
  const auto& table = kernels(rows->path, 0.0f);
  expect(dx, rows->rows * rows->n * (int64_t)sizeof(float));
  for_rows(rows->rows, rows->n, rows->threads, [&](int64_t r, int share) {
    loss[r] = table.loss(row_of<float>(*rows, r, share), static_cast<const float*>(target) + r * rows->n,
                         static_cast<float*>(dx) + r * rows->n);
    is_left[r] = !std::isfinite(loss[r]);
  });
}

int khot_pursue(const khot_signals* signals, void* alpha, int64_t* atoms, void* coefs, int64_t* taken,
                uint8_t* is_close) noexcept {
  if (signals->dtype == KHOT_FLOAT)
    return pursue(*signals, static_cast<float*>(alpha), atoms, static_cast<float*>(coefs), taken, is_close);
  return pursue(*signals, static_cast<double*>(alpha), atoms, static_cast<double*>(coefs), taken, is_close);
}

int khot_attend(const khot_cells* cells, void* output, int64_t* k, double* bound, int64_t* scored, uint8_t* is_refused,
                uint8_t* head) noexcept {
  if (cells->dtype == KHOT_FLOAT)
    return attend(*cells, static_cast<float*>(output), k, bound, scored, is_refused, head);
  return attend(*cells, static_cast<double*>(output), k, bound, scored, is_refused, head);
}
