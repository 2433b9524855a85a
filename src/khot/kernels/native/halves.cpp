// The entry points over rows of 16 bits: a few rows at a time become floats, and what is written is rounded once.
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <new>

#include "dispatch.h"

namespace {

using Room = std::unique_ptr<float[]>;

Room room_of(int64_t floats) { return Room(new (std::nothrow) float[(size_t)floats]); }

// `count` rows from row `first` on, as floats in `x`, or room for them there.
khot_rows widened(const khot_rows& rows, int64_t first, int64_t count, int threads, float* x, bool is_room = false) {
  khot_rows some = rows;
  some.x = x;
  some.rows = count;
  some.k += some.k ? first * rows.k_stride : 0;
  some.temperature += some.temperature ? first * rows.temperature_stride : 0;
  some.mask += some.mask ? first * rows.mask_row_stride : 0;
  some.dtype = KHOT_FLOAT;
  some.threads = threads;
  const auto* from = static_cast<const uint16_t*>(rows.x) + first * rows.n;
  if (!is_room) kernels(rows.path, float()).widen(rows.dtype, from, count * rows.n, threads, x);
  return some;
}

// The derivative of a row without a finite threshold, whose y tells all: it is solved again.
bool pull_anew(const khot_rows& rows, int64_t r, int threads, const uint16_t* g, uint16_t* dx) {
  const auto& table = kernels(rows.path, float());
  const Room room = room_of(3 * rows.n);
  if (!room) return false;
  float *y = room.get() + rows.n, *cotangent = y + rows.n;
  khot_rows one = widened(rows, r, 1, threads, room.get());
  topk(one, y);
  one.x = y;
  table.widen(rows.dtype, g, rows.n, threads, cotangent);
  pull(one, cotangent, cotangent, nullptr);
  table.narrow(rows.dtype, cotangent, rows.n, threads, dx);
  return true;
}

}  // namespace

int khot_half_topk(const khot_rows* rows, void* y, double* roots) noexcept {
  const int64_t n = rows->n;
  const auto& table = kernels(rows->path, float());
  // The quick way of one row reads it as it is.
  const bool is_read = rows->cdf == KHOT_SIGMOID && n > khot::kGrouped && n < kSplit;
  const int64_t most = n <= khot::kGrouped ? rows_at_once(table.group, n) : 1;
  auto* out = static_cast<uint16_t*>(y);
  std::atomic<int> status{KHOT_OK};
  const bool goes_past = rows->rows * n * (int64_t)sizeof(uint16_t) >= kPast;
  expect(out, rows->rows * n * (int64_t)sizeof(uint16_t), rows->threads);
  for_rows((rows->rows + most - 1) / most, most * n, rows->threads, [&](int64_t b, int share) {
    const int64_t first = b * most, count = rows->rows - first < most ? rows->rows - first : most;
    const Room room = room_of(2 * count * n);
    if (!room) {
      status = KHOT_NO_MEMORY;
      return;
    }
    constexpr double none = std::numeric_limits<double>::quiet_NaN();
    khot::Kept kept[kBatch];
    for (int64_t i = 0; i < count; ++i) {
      const auto* x = is_read ? static_cast<const uint16_t*>(rows->x) + (first + i) * n : nullptr;
      kept[i] = {{none, 0}, rows->dtype, x, out + (first + i) * n, false, goes_past};
    }
    float* p = room.get() + count * n;
    topk(widened(*rows, first, count, share, room.get(), is_read), p, kept);
    for (int64_t i = 0; i < count; ++i) {
      if (!kept[i].has_written) table.narrow(rows->dtype, p + i * n, n, share, kept[i].y);
      if (roots) roots[2 * (first + i)] = kept[i].root.anchor, roots[2 * (first + i) + 1] = kept[i].root.shift;
    }
  });
  return status;
}

int khot_half_pull(const khot_rows* rows, const double* roots, const void* g, void* dx) noexcept {
  const int64_t n = rows->n, most = n < kParallel ? kParallel / n : 1;
  const auto& table = kernels(rows->path, float());
  std::atomic<int> status{KHOT_OK};
  const bool goes_past = rows->rows * n * (int64_t)sizeof(uint16_t) >= kPast;
  expect(dx, rows->rows * n * (int64_t)sizeof(uint16_t), rows->threads);
  for_rows((rows->rows + most - 1) / most, most * n, rows->threads, [&](int64_t b, int share) {
    const Room room = room_of(n);
    bool is_done = room != nullptr;
    for (int64_t r = b * most; is_done && r < (b + 1) * most && r < rows->rows; ++r) {
      const auto at = [=](const void* all) { return static_cast<const uint16_t*>(all) + r * n; };
      const khot::Halves halves = {rows->dtype, at(rows->x), at(g), const_cast<uint16_t*>(at(dx))};
      const khot::Root root = {roots[2 * r], roots[2 * r + 1]};
      if (std::isfinite(root.anchor)) {
        auto row = row_of<float>(*rows, r, share);
        row.goes_past = goes_past;
        table.half_pull[rows->cdf](row, halves, root, room.get());
      } else
        is_done = pull_anew(*rows, r, share, halves.g, halves.dx);
    }
    if (!is_done) status = KHOT_NO_MEMORY;
  });
  return status;
}
