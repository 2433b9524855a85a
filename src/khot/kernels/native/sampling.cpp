// Sampling: twins of _math/noise.py, pivotal.py and systematic.py, to the last bit. Compiled once for every machine.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "khot.h"
#include "parallel.h"

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

inline uint64_t word_at(uint64_t key, int64_t place) { return mixed(key + (uint64_t)(place + 1) * kGolden); }
inline uint64_t stream_key(uint64_t seed, uint64_t stream) { return mixed(seed ^ stream * kGolden); }
inline double unit(uint64_t word) { return (double)(int64_t)(word >> 11) * 0x1p-53; }

// The key of draw d of a row; both draws of a pair have the same.
inline uint64_t row_key(int64_t seed, int64_t d, int64_t rows, int64_t row, bool is_paired) {
  return word_at((uint64_t)seed, (is_paired ? d / 2 : d) * rows + row);
}

inline int bit_length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }
inline double inside_unit(double p) {
  p = p > 0 ? p : 0;  // NaN too: each line is one instruction
  return p < 1 ? p : 1;
}

// The whole number next to a value in [0, 2^52], ties to even; the standard functions are calls on older processors.
// Between 2^52 and 2^53 doubles are the whole numbers, in the order of their bits.
inline int64_t rounded(double value) {
  const double shifted = value + 0x1p52;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - (int64_t)0x4330000000000000;
}
inline int64_t floored(double value) {
  const auto truncated = (int64_t)value;
  return truncated - (value < (double)truncated);
}

// Room for n values: on the stack if they are few. `data` is null if there is no memory; a region of OpenMP must not
// throw.
template <class T> class Scratch {
 public:
  explicit Scratch(int64_t n) : heap_(n > kFew ? new (std::nothrow) T[(size_t)n] : nullptr) {
    data = n > kFew ? heap_.get() : few_;
  }
  T* data;

 private:
  static constexpr int64_t kFew = 640;
  T few_[kFew];
  std::unique_ptr<T[]> heap_;
};

void insertion_sort(uint64_t* words, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const uint64_t word = words[i];
    int64_t j = i;
    for (; j > 0 && words[j - 1] > word; --j) words[j] = words[j - 1];
    words[j] = word;
  }
}

constexpr int kMostBits = 13;
constexpr int64_t kFewWords = 8192;  // that many are sorted in the cache, in one go

// Distributes what word(i) gives over 2^bits buckets, by its bits from `used` on; ends[b] is where bucket b ends.
template <class Index, class Word>
void distribute(int64_t n, int used, int bits, uint64_t* out, Index* ends, Word word) {
  const int shift = 64 - used - bits;
  const uint64_t mask = ((uint64_t)1 << bits) - 1;
  std::fill_n(ends, (1 << bits) + 1, 0);
  for (int64_t i = 0; i < n; ++i) ++ends[((word(i) >> shift) & mask) + 1];
  for (int b = 0; b < 1 << bits; ++b) ends[b + 1] += ends[b];
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t w = word(i);
    out[ends[(w >> shift) & mask]++] = w;
  }
}

// Sorts words that are random from the bit `used` on: buckets of one or two leave little to sort.
template <class Word> void sort_words(int64_t n, int used, uint64_t* out, Word word) {
  int32_t ends[(1 << kMostBits) + 1];
  distribute(n, used, std::clamp(bit_length((uint64_t)n), 1, kMostBits), out, ends, word);
  insertion_sort(out, n);
}

// A random order: words of the key sorted as signed numbers, their lowest bits replaced by the index. Returns the mask
// of those.
uint64_t random_order(uint64_t key, int64_t n, uint64_t* words, uint64_t* scratch) {
  const uint64_t low = ((uint64_t)1 << bit_length((uint64_t)std::max<int64_t>(n - 1, 1))) - 1;
  const auto word = [=](int64_t i) { return ((word_at(key, i) & ~low) | (uint64_t)i) ^ (uint64_t)1 << 63; };
  if (n <= kFewWords) {
    sort_words(n, 0, words, word);
    return low;
  }
  int64_t ends[(1 << kMostBits) + 1];
  const int bits = std::min(bit_length((uint64_t)(n / (kFewWords / 2))), kMostBits);
  distribute(n, 0, bits, scratch, ends, word);
  for (int64_t b = 0, begin = 0; b < 1 << bits; begin = ends[b++]) {
    const uint64_t* bucket = scratch + begin;
    sort_words(ends[b] - begin, bits, words + begin, [=](int64_t i) { return bucket[i]; });
  }
  return low;
}

struct Duel {
  double residual;
  uint8_t result;  // 1: the left goes on; 2: the one that stops becomes 1
};

// No branch: the outcome of a coin is not to be predicted.
inline double chosen(bool first, double a, double b) {
  uint64_t u, v;
  std::memcpy(&u, &a, sizeof u);
  std::memcpy(&v, &b, sizeof v);
  u = v ^ ((u ^ v) & -(uint64_t)first);
  std::memcpy(&a, &u, sizeof a);
  return a;
}

inline Duel duel(double a, double b, double coin) {
  const double s = a + b;
  const bool is_won = s >= 1;
  const bool goes_on = coin * chosen(is_won, 2 - s, s) < chosen(is_won, 1 - a, a);
  return {s - (double)is_won, (uint8_t)(goes_on | is_won << 1)};
}

constexpr int64_t kAhead = 32;  // so many leaves ahead, the memory of a random one is asked for

// One sample along the tree whose leaf i is the item place(i).
template <bool Scattered, class T, class Place> void pivotal_tree(const T* p, int64_t n, bool is_whole, uint64_t key,
                                                                  bool is_opposite, double* residual, uint8_t* duels,
                                                                  uint8_t* value, T* out, Place place) {
  const auto coin = [=](int64_t place) {
    const double u = unit(word_at(key, place));
    return is_opposite ? (1 - 0x1p-53) - u : u;
  };
  const auto leaf = [=](int64_t i) { return inside_unit((double)p[place(i)]); };
  int64_t coins = 0, size = n;
  if (n == 1) residual[0] = leaf(0);
  while (size > 1) {
    const int64_t half = size / 2, next = (size + 1) / 2;
    const auto meet = [&](int64_t i, double a, double b) {
      const Duel d = duel(a, b, coin(coins + i));
      residual[i] = d.residual;
      duels[coins + i] = d.result;
    };
    if (size == n) {
      for (int64_t i = 0; i < half; ++i) {
        if (Scattered && 2 * i + kAhead + 1 < n) {
          __builtin_prefetch(p + place(2 * i + kAhead));
          __builtin_prefetch(p + place(2 * i + kAhead + 1));
        }
        meet(i, leaf(2 * i), leaf(2 * i + 1));
      }
      if (next > half) meet(half, leaf(2 * half), 0);
    } else {
      for (int64_t i = 0; i < half; ++i) meet(i, residual[2 * i], residual[2 * i + 1]);
      if (next > half) meet(half, residual[2 * half], 0);
    }
    coins += next;
    size = next;
  }
  value[0] = residual[0] >= (is_whole ? 0.5 : 1 - coin(coins));
  // Down again: the number of nodes of each level follows from n, so it is found by halving as often as needed.
  int levels = 0;
  for (int64_t m = n; m > 1; m = (m + 1) / 2) ++levels;
  for (int level = levels - 1; level >= 0; --level) {
    int64_t below = n;
    for (int l = 0; l < level; ++l) below = (below + 1) / 2;
    const int64_t nodes = (below + 1) / 2;
    coins -= nodes;
    for (int64_t i = nodes - 1; i >= 0; --i) {
      const uint8_t d = duels[coins + i], v = value[i], won = d >> 1, goes_on = d & 1;
      const uint8_t swap = (uint8_t)((v ^ won) & -goes_on), left = won ^ swap, right = v ^ swap;
      if (level) {
        value[2 * i] = left;
        value[2 * i + 1] = right;
      } else {
        if (Scattered && 2 * i >= kAhead) {
          __builtin_prefetch(out + place(2 * i - kAhead), 1);
          __builtin_prefetch(out + place(2 * i - kAhead + 1), 1);
        }
        out[place(2 * i)] = (T)left;
        if (2 * i + 1 < n) out[place(2 * i + 1)] = (T)right;
      }
    }
  }
  if (n == 1) out[0] = (T)value[0];
}

template <class T> int pivotal(const khot_draws& of, const uint8_t* is_whole, const int64_t* order,
                               int64_t order_stride, bool is_random, T* out) {
  const int64_t n = of.n;
  std::atomic<int> status{KHOT_OK};
  for_rows(of.draws * of.rows, n, of.threads, [&](int64_t r, int) {
    const int64_t row = r % of.rows, d = r / of.rows;
    const uint64_t key = row_key(of.seed, d, of.rows, row, of.is_paired);
    const bool is_opposite = of.is_paired && d % 2;
    Scratch<double> residual(n);
    Scratch<uint8_t> duels(n + 64), value(n + 2);
    Scratch<uint64_t> words(is_random ? n : 0), spare(is_random ? n : 0);
    if (!residual.data || !duels.data || !value.data || !words.data || !spare.data) {
      status = KHOT_NO_MEMORY;
      return;
    }
    const auto along = [&](auto is_scattered, auto place) {
      pivotal_tree<is_scattered.value>(static_cast<const T*>(of.p) + row * n, n, is_whole[row] != 0, stream_key(key, 2),
                                       is_opposite, residual.data, duels.data, value.data, out + r * n, place);
    };
    if (is_random) {
      const uint64_t* places = words.data;
      const uint64_t low = random_order(stream_key(key, 1), n, words.data, spare.data);
      along(std::true_type{}, [=](int64_t i) { return (int64_t)(places[i] & low); });
    } else if (order) {
      along(std::true_type{}, [=](int64_t i) { return order[row * order_stride + i]; });
    } else {
      along(std::false_type{}, [](int64_t i) { return i; });
    }
  });
  return status;
}

template <class T> void systematic(const khot_draws& of, const double* k, T* out) {
  const int64_t n = of.n, rows = of.rows;
  const int shift = std::min(52, 62 - bit_length((uint64_t)n));
  const int64_t one = (int64_t)1 << shift;
  const auto scale = (double)one;
  for_rows(rows, n, of.threads, [&](int64_t row, int) {
    const T* items = static_cast<const T*>(of.p) + row * n;
    int64_t sum = 0;
    double spread = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double x = inside_unit((double)items[i]);
      sum += rounded(x * scale);
      spread += x * (1 - x);
    }
    const double size = k[row] > 0 ? std::min(k[row], (double)n) : 0;  // the caller sees to it; a number in any case
    const int64_t lack = (int64_t)std::nearbyint(size * scale) - sum;
    const int64_t least = std::min<int64_t>(lack, 0), most = std::max<int64_t>(lack, 0);
    const auto share = [&](double total, auto measure_of) {
      const double factor = (double)lack / (total > 0 ? total : 1);
      for (int64_t d = 0; d < of.draws; ++d) {
        T* chosen = out + (d * rows + row) * n;
        const uint64_t turn = of.is_paired && d % 2 ? (uint64_t)one / 2 : 0;
        int64_t running = (int64_t)((row_key(of.seed, d, rows, row, of.is_paired) + turn) & (uint64_t)(one - 1)),
                passed = 0, given = 0;
        double measure = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double x = inside_unit((double)items[i]);
          measure += measure_of(x);
          const int64_t now = measure >= total ? lack : std::clamp(floored(measure * factor), least, most);
          running += rounded(x * scale) + now - given;
          given = now;
          const int64_t until = running >> shift;
          chosen[i] = (T)(int32_t)(until - passed);
          passed = until;
        }
      }
    };
    if (std::fabs((double)lack) <= spread * scale) return share(spread, [](double x) { return x * (1 - x); });
    const auto room = [=](double x) {
      const int64_t w = rounded(x * scale);
      return w == 0 || w == one ? 0 : lack > 0 ? 1 - x : x;
    };
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += room(inside_unit((double)items[i]));
    share(total, room);
  });
}

}  // namespace

int khot_pivotal(const khot_draws* draws, const uint8_t* is_whole, const int64_t* order, int64_t order_stride,
                 int is_random, void* out) noexcept {
  if (draws->dtype == KHOT_FLOAT)
    return pivotal(*draws, is_whole, order, order_stride, is_random != 0, static_cast<float*>(out));
  return pivotal(*draws, is_whole, order, order_stride, is_random != 0, static_cast<double*>(out));
}

void khot_systematic(const khot_draws* draws, const double* k, void* out) noexcept {
  if (draws->dtype == KHOT_FLOAT) return systematic(*draws, k, static_cast<float*>(out));
  systematic(*draws, k, static_cast<double*>(out));
}

void khot_uniform(int64_t seed, int64_t stream, int64_t count, int threads, double* out) noexcept {
  const uint64_t key = stream_key((uint64_t)seed, (uint64_t)stream);
  for_rows((count + kChunk - 1) / kChunk, kChunk, threads, [&](int64_t chunk, int) {
    const int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) out[i] = unit(word_at(key, i));
  });
}

int khot_order(const int64_t* keys, int64_t rows, int64_t n, int threads, int64_t* out) noexcept {
  std::atomic<int> status{KHOT_OK};
  for_rows(rows, n, threads, [&](int64_t r, int) {
    Scratch<uint64_t> words(n), spare(n);
    if (!words.data || !spare.data) {
      status = KHOT_NO_MEMORY;
      return;
    }
    const uint64_t low = random_order((uint64_t)keys[r], n, words.data, spare.data);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] = (int64_t)(words.data[i] & low);
  });
  return status;
}
