// The entry points over rows: they choose the kernels for the machine and share rows out to threads.
#if defined(__x86_64__)
#define KHOT_X86
#endif

#include <atomic>
#include <memory>
#include <new>

#include "kernels.h"
#include "parallel.h"

#ifndef KHOT_ABI
#define KHOT_ABI 0  // a build for the fuzz program, which Python refuses
#endif

namespace {

bool has_avx2() {
#ifdef KHOT_X86
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return yes;
#else
  return false;
#endif
}

#ifdef KHOT_X86
const khot::Kernels<float>& kernels(int32_t path, float) {
  return path && has_avx2() ? khot::avx2_float : khot::portable_float;
}
const khot::Kernels<double>& kernels(int32_t path, double) {
  return path && has_avx2() ? khot::avx2_double : khot::portable_double;
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
          threads};
}

constexpr int64_t kBatch = 128;  // so many short rows are solved together
constexpr int64_t kFewRows = 3;  // fewer are not worth eight lanes

// σ_k of `count` ≤ kBatch short rows from row `first` on: eight at once the quick way, those that remain eight at once
// the sure way, and what still remains one by one.
template <class T>
void topk_short(const khot::Kernels<T>& table, const khot_rows& rows, int64_t first, int64_t count, T* y) {
  khot::Row<T> batch[kBatch + 7];
  T* out[kBatch + 7];
  for (int64_t i = 0; i < count; ++i) {
    batch[i] = row_of<T>(rows, first + i, 1);
    out[i] = y + (first + i) * rows.n;
  }
  // Solves the rows of the batch, and keeps those that are not.
  const auto pass = [&](auto solve_eight) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; i += 8) {
      const int64_t rest = count - i;
      for (int64_t j = rest; j < 8; ++j) batch[i + j] = batch[i], out[i + j] = out[i];  // a group of eight is filled up
      unsigned which = rest < kFewRows ? ~0u : solve_eight(batch + i, out + i);
      if (rest < 8) which &= (1u << rest) - 1;
      for (; which; which &= which - 1, ++left) {
        batch[left] = batch[i + __builtin_ctz(which)];
        out[left] = out[i + __builtin_ctz(which)];
      }
    }
    count = left;
  };
  pass(table.quick_eight);
  pass(table.sure_eight);
  for (int64_t i = 0; i < count; ++i) table.row[KHOT_SIGMOID](batch[i], out[i]);
}

template <class T> void topk(const khot_rows& rows, T* y) {
  const auto& table = kernels(rows.path, T());
  const int64_t n = rows.n;
  if (table.quick_eight && rows.cdf == KHOT_SIGMOID && n <= khot::kShort && rows.rows >= kFewRows) {
    // Multiples of eight, whatever the number of threads: the same rows come together, and give the same bits.
    const int64_t most = kParallel / n < kBatch ? kParallel / n & ~(int64_t)7 : kBatch;
    return for_rows((rows.rows + most - 1) / most, most * n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * most, rest = rows.rows - first;
      topk_short(table, rows, first, rest < most ? rest : most, y);
    });
  }
  for_rows(rows.rows, n, rows.threads,
           [&](int64_t r, int share) { table.row[rows.cdf](row_of<T>(rows, r, share), y + r * n); });
}

template <class T> void margin(const khot_rows& rows, T* z, uint8_t* is_left) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads,
           [&](int64_t r, int share) { is_left[r] = !table.margin(row_of<T>(rows, r, share), z + r * rows.n); });
}

template <class T> void hard(const khot_rows& rows, T* out) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads,
           [&](int64_t r, int share) { table.hard(row_of<T>(rows, r, share), out + r * rows.n); });
}

template <class T> void pull(const khot_rows& rows, const T* g, T* dx, double* dk) {
  const auto& table = kernels(rows.path, T());
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    const double mean = table.pull[rows.cdf](row_of<T>(rows, r, share), g + r * rows.n, dx + r * rows.n);
    if (dk) dk[r] = mean;
  });
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

int khot_has_avx2() noexcept { return has_avx2(); }

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

void khot_statistical(const khot_rows* rows, double smooth, int is_exact, void* y, double* theta) noexcept {
  if (rows->dtype == KHOT_FLOAT) return statistical(*rows, smooth, is_exact, static_cast<float*>(y), theta);
  statistical(*rows, smooth, is_exact, static_cast<double*>(y), theta);
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
