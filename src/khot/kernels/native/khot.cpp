// The entry points over rows of float and double; those of 16 bits are in halves.cpp, those of samples in sampling.cpp.
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "dispatch.h"

#ifndef KHOT_ABI
#define KHOT_ABI 0  // a build for the fuzz program, which Python refuses
#endif

namespace {

std::atomic<int> held{KHOT_AVX512};  // no wider path than this

}  // namespace

int khot::widest() {
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

namespace {

template <class T> void cost_topk(const khot_rows& rows, bool gives_margins, T* out, uint8_t* is_left) {
  expect(out, rows.rows * rows.n * (int64_t)sizeof(T), rows.threads);
  const auto& table = kernels(rows.path, T());
  if (table.group && rows.n <= khot::kShort && rows.rows >= kFewRows) {
    const int64_t group = table.group;
    const auto one = row_of<T>(rows, 0, 1);
    return for_rows((rows.rows + group - 1) / group, group * rows.n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * group, count = rows.rows - first < group ? rows.rows - first : group;
      khot::Row<T> batch[khot::kMostRows];
      T* to[khot::kMostRows];
      for (int64_t i = 0; i < group; ++i) {  // a group is filled up
        const int64_t r = first + (i < count ? i : 0);
        put_row(rows, one, r, batch[i]);
        to[i] = out + r * rows.n;
      }
      const unsigned rest = table.cost_group[rows.cdf](batch, gives_margins, to);
      for (int64_t i = 0; i < count; ++i)
        is_left[first + i] = rest >> i & 1 && !table.cost_row[rows.cdf](batch[i], gives_margins, to[i]);
    });
  }
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int share) {
    is_left[r] = !table.cost_row[rows.cdf](row_of<T>(rows, r, share), gives_margins, out + r * rows.n);
  });
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
  if (rows.n <= khot::kTiny) {
    return for_rows((rows.rows + kBatch - 1) / kBatch, kBatch * rows.n, rows.threads, [&](int64_t b, int) {
      const int64_t first = b * kBatch, rest = rows.rows - first;
      table.hard_short(rows, first, rest < kBatch ? rest : kBatch, out);
    });
  }
  for_rows(rows.rows, rows.n, rows.threads,
           [&](int64_t r, int share) { table.hard(row_of<T>(rows, r, share), out + r * rows.n); });
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

int khot_path() noexcept { return khot::widest(); }

void khot_hold(int path) noexcept { held = path; }

void khot_topk(const khot_rows* rows, void* y) noexcept {
  if (rows->dtype == KHOT_FLOAT) return topk(*rows, static_cast<float*>(y));
  topk(*rows, static_cast<double*>(y));
}

void khot_cost_topk(const khot_rows* rows, int gives_margins, void* out, uint8_t* is_left) noexcept {
  if (rows->dtype == KHOT_FLOAT) return cost_topk(*rows, gives_margins != 0, static_cast<float*>(out), is_left);
  cost_topk(*rows, gives_margins != 0, static_cast<double*>(out), is_left);
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
  expect(dx, rows->rows * rows->n * (int64_t)sizeof(float), rows->threads);
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
