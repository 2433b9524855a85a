// Attention of one query to as few keys as its cells certify: cells are opened by falling bound on their mass, e^score.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace khot {
namespace {

constexpr double kMostLog = 600;  // of a mass: sums of e^600 are finite; as in attention/_cells.py
constexpr double kExp = 0x1p-40;  // the rounding of e^x, with room to spare; as in _math/tails.py
constexpr double kTiny = 2.2250738585072014e-308;

template <class T> T dot(const T* a, const T* b, int64_t d) {
  typedef T Lanes __attribute__((vector_size(32)));
  constexpr int64_t w = 32 / sizeof(T);
  Lanes first = {}, second = {}, x, y;
  const auto add = [&](Lanes& sum, int64_t i) {
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    sum += x * y;
  };
  int64_t i = 0;
  for (; i + 2 * w <= d; i += 2 * w) {
    add(first, i);
    add(second, i + w);
  }
  if (i + w <= d) {
    add(first, i);
    i += w;
  }
  first += second;
  T sum = 0;
  for (int64_t l = 0; l < w; ++l) sum += first[l];
  for (; i < d; ++i) sum += a[i] * b[i];
  return sum;
}

// What a bound on the tail mass becomes by rounding: never less than the truth.
inline double rounded_up(double left, double kept, int64_t terms) {
  const double bound = left / (kept + left) * (1 + (double)terms * 0x1p-51 + kExp) + kTiny;
  return bound < 1 ? bound : 1;
}

template <class T> class Attention {
 public:
  Attention(const Cells<T>& cells, const Query<T>& query, const Opened& room) : c(cells), q(query), room(room) {}

  Found run(T* output, uint8_t* head) {
    int64_t opened = search();
    Found found = {0, 0, 0, 0};
    double kept;
    if (opened >= 0) {
      found.scored = count;
      kept = shrink(opened, &found);
    } else {
      kept = everything(&found);
    }
    if (head)
      for (int64_t i = 0; i < count; ++i) head[room.keys[i].at] = 1;
    if (output) average(kept, output);
    return found;
  }

 private:
  const Cells<T>& c;
  const Query<T>& q;
  const Opened& room;
  int64_t count = 0;  // keys in room.keys
  double up = 1;      // what rounding may have made of a mass

  bool allows(int64_t at) const { return at >= 0 && (!q.mask || q.mask[at]); }

  // Scores the keys of some cells, and returns the largest score.
  double open(int64_t first, int64_t last) {
    double top = -std::numeric_limits<double>::infinity();
    for (int64_t i = first * c.size; i < last * c.size; ++i) {
      if (!allows(c.index[i])) continue;
      const double score = (double)dot(q.x, c.keys + i * c.d, c.d);
      room.keys[count++] = {score, c.index[i]};
      top = score > top ? score : top;
    }
    return top;
  }

  // Turns the scores of the keys from `first` on into masses, e^(score − shift), and returns their sum.
  double weigh(int64_t first, double shift) {
    double sum = 0;
    for (int64_t i = first; i < count; ++i) sum += room.keys[i].mass = std::exp(room.keys[i].mass - shift);
    return sum;
  }

  // Opens cells until the others cannot matter; returns how many, or −1 if they are too many.
  int64_t search() {
    double peak = open(c.bounded, c.used), shift = peak, square = 0;
    for (int64_t i = 0; i < c.d; ++i) square += (double)q.x[i] * (double)q.x[i];
    const double norm = std::sqrt(square), delta = q.slack * norm;
    up = std::exp(delta);
    int64_t m = 0;
    bool is_finite = true;
    for (int64_t cell = 0; cell < c.bounded; ++cell) {
      int64_t some = c.counts[cell];
      if (q.mask) {
        some = 0;
        for (int64_t i = cell * c.size; i < (cell + 1) * c.size; ++i) some += allows(c.index[i]);
      }
      if (!some) continue;
      const double score = (double)dot(q.x, c.centre + cell * c.d, c.d), most = norm * (double)c.radius[cell];
      is_finite &= std::isfinite(score + most);
      peak = score + most > peak ? score + most : peak;
      if (some == c.counts[cell] && score > shift) shift = score;  // Jensen: the mean of e^x is at least e^mean
      room.cells[m++] = {score, cell, some};
    }
    if (shift < peak - kMostLog) shift = peak - kMostLog;
    double mass = weigh(0, shift) / up;
    // Scores that are off by more certify nothing.
    if (!(m || count) || !is_finite || !std::isfinite(mass) || !(delta < 50)) return -1;
    for (int64_t i = 0; i < m; ++i) {
      auto& cell = room.cells[i];
      const double b = norm * (double)c.radius[cell.at], share = (double)c.share[cell.at];
      const double mean = (std::exp(-(1 + share) * b) + share) / (1 + share);  // of e^(x − b), by Bennett
      const double whole = (double)c.counts[cell.at] * mean, some = (double)cell.some;
      cell.mass = std::exp(cell.mass + b - shift) * (some < whole ? some : whole) * up;
      if (!(cell.mass >= 0)) return -1;
    }
    sort_falling(room.cells, m);
    double sum = 0;
    for (int64_t i = m; i--;) room.rest[i] = sum += room.cells[i].mass;
    room.rest[m] = 0;
    const int64_t limit = c.limit < m ? c.limit : m;
    if (!(room.rest[limit] <= q.epsilon * (room.rest[0] + mass * up * up))) return -1;
    const double within = q.epsilon * (1 - 0x1p-30), more = 1 + (double)c.used * 0x1p-51 + kExp;
    for (int64_t opened = 0;; ++opened) {
      const double left = room.rest[opened] = room.rest[opened] * more + (double)c.used * kTiny;
      if (count && left <= within * (left + mass)) return opened;
      if (opened == limit) return -1;
      const int64_t first = count, cell = room.cells[opened].at;
      open(cell, cell + 1);
      mass += weigh(first, shift) / up;
    }
  }

  // Keeps as few of the keys as are certified, the largest, at the front of room.keys; returns the sum of their masses.
  double shrink(int64_t opened, Found* found) {
    const double unread = room.rest[opened];
    const auto bound = [&](double head, double tail) { return rounded_up(tail * up + unread, head / up, count); };
    const auto sum = [&](int64_t begin, int64_t end) {
      double all = 0;
      for (int64_t i = begin; i < end; ++i) all += room.keys[i].mass;
      return all;
    };
    int64_t few = 0, enough = count;  // few are not enough; the keys between are in no order
    double head = 0, tail = 0;        // of the first `few`, and of those after `enough`
    while (enough - few > 1) {
      const int64_t middle = few + (enough - few) / 2;
      part_falling(room.keys + few, middle - few, enough - few);
      const double low = sum(few, middle), high = sum(middle, enough);
      if (bound(head + low, high + tail) <= q.epsilon) {
        enough = middle;
        tail += high;
      } else {
        few = middle;
        head += low;
      }
    }
    head += sum(few, enough);
    found->bound = bound(head, tail);
    found->k = count = enough;
    return head;
  }

  // Scores all keys; returns the sum of their masses.
  double everything(Found* found) {
    count = 0;
    const double top = open(0, c.used), sum = weigh(0, top);
    *found = {count, count, std::isnan(sum) ? sum : 0.0, (uint8_t)(count > 1)};
    return sum;
  }

  void average(double total, T* output) const {
    for (int64_t j = 0; j < c.e; ++j) output[j] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const T weight = (T)(room.keys[i].mass / total);
      const T* v = c.values + room.keys[i].at * c.value_stride;
      for (int64_t j = 0; j < c.e; ++j) output[j] += weight * v[j];
    }
  }
};

template <class T>
Found attend(const Cells<T>& cells, const Query<T>& query, const Opened& room, T* output, uint8_t* head) {
  return Attention<T>(cells, query, room).run(output, head);
}

}  // namespace
}  // namespace khot
