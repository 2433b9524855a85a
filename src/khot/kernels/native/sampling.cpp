// Samples: twins of _math/pivotal.py and systematic.py, to the last bit.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "khot.h"
#include "parallel.h"
#include "random.h"

namespace {

inline double inside_unit(double p) {
  p = p > 0 ? p : 0;  // NaN too: each line is one instruction
  return p < 1 ? p : 1;
}

// The whole number next to a value in [0, 2^52], ties to even; the standard functions are calls on older processors.
// Between 2^52 and 2^53 doubles are the whole numbers, in the order of their bits.
inline int64_t rounded(double value) { return (int64_t)(bits_of(value + 0x1p52) - bits_of(0x1p52)); }
inline int64_t floored(double value) {
  const auto truncated = (int64_t)value;
  return truncated - (value < (double)truncated);
}
inline int64_t small_floor(double value) {  // |value| ≤ 2^51
  const double shifted = value + 0x1.8p52;
  return (int64_t)(bits_of(shifted) - bits_of(0x1.8p52)) - (value < shifted - 0x1.8p52);
}

// ── pivotal ──────────────────────────────────────────────────────────────────────────────────────────────────────────
// The coins of a tree: coin i of a stream, or the opposite one.
struct Coins {
  uint64_t key;
  double base, sign;
  Coins(uint64_t key, bool is_opposite) : key(key), base(is_opposite ? 1 - 0x1p-53 : 0), sign(is_opposite ? -1 : 1) {}
  double operator()(int64_t i) const { return base + sign * unit(word_at(key, i)); }
};

// What a subtree leaves: an item that goes on (−1: none), and its probability.
struct Node {
  double p;
  int64_t item;
};

// One level: node i is what the nodes 2i and 2i + 1 leave. ones[i] becomes the item that stops there as a 1, or −1.
// Returns how many there are.
KHOT_CLONES int64_t meet(const double* p, const int64_t* items, int64_t nodes, const Coins& coins, int64_t first,
                         double* next_p, int64_t* next_items, int64_t* ones) {
  const Coins coin = coins;
  int64_t count = 0;
  for (int64_t i = 0; i < nodes; ++i) {
    const double a = p[2 * i], b = p[2 * i + 1], s = a + b;
    const int64_t left = items[2 * i], right = items[2 * i + 1];
    const bool is_won = s >= 1;
    const bool is_ahead = coin(first + i) * (is_won ? 2 - s : s) < (is_won ? 1 - b : a);
    next_p[i] = s - (is_won ? 1.0 : 0.0);
    next_items[i] = is_ahead != is_won ? left : right;
    ones[i] = is_won ? (is_ahead ? left : right) : -1;
    count += is_won;
  }
  return count;
}

// A tree over n leaves, of which the nodes of level l are the subtrees of 2^l leaves, the last one cut short.
template <class T> class Tree {
 public:
  Tree(const T* p, int64_t n, Coins coins, T* out) : p_(p), n_(n), coins_(coins), out_(out) {
    for (levels_ = 0, first_[0] = 0; nodes(levels_) > 1; ++levels_)
      first_[levels_ + 1] = first_[levels_] + nodes(levels_ + 1);
  }

  // Draws; place_all(begin, count, items) gives the items at places of the order.
  template <class Place> void draw(bool is_whole, int threads, Place place_all) {
    for_parts(n_, threads, [&](int64_t, int64_t begin, int64_t end) { std::fill(out_ + begin, out_ + end, (T)0); });
    const int top = threads > 1 ? std::min(part_bits(n_), levels_) : levels_;
    Node parts[kMostParts];
    const auto part = [&](int64_t i, int64_t begin, int64_t end) {
      Node waiting[64];
      for (int64_t at = begin; at < end; at += kBlock)
        climb(block(at, std::min(kBlock, end - at), place_all), std::min(kBlockBits, levels_), at >> kBlockBits, top,
              waiting, &parts[i]);
    };
    if (top == levels_) part(0, 0, n_);
    else for_parts(n_, threads, part);
    Node root = parts[0], waiting[64];
    if (top < levels_)
      for (int64_t i = 0; i < nodes(top); ++i) climb(parts[i], top, i, levels_, waiting, &root);
    if (root.p >= (is_whole ? 0.5 : 1 - coins_(first_[levels_])) && root.item >= 0) out_[root.item] = (T)1;
  }

 private:
  int64_t nodes(int level) const { return (n_ + ((int64_t)1 << level) - 1) >> level; }

  // The node of the leaves from `begin` on.
  template <class Place> Node block(int64_t begin, int64_t count, const Place& place_all) {
    double p[2][kBlock + 1];
    int64_t items[2][kBlock + 1], ones[kBlock / 2];
    place_all(begin, count, items[0]);
    for (int64_t i = 0; i < count; ++i) p[0][i] = inside_unit((double)p_[items[0][i]]);
    int now = 0;
    for (int level = 0; level < std::min(kBlockBits, levels_); ++level, now ^= 1) {
      p[now][count] = 0;  // the missing one of a pair
      items[now][count] = -1;
      count = (count + 1) / 2;
      if (meet(p[now], items[now], count, coins_, first_[level] + (begin >> (level + 1)), p[!now], items[!now], ones))
        for (int64_t i = 0; i < count; ++i)
          if (ones[i] >= 0) out_[ones[i]] = (T)1;
    }
    return {p[now][0], items[now][0]};
  }

  // Takes node i of a level upwards until it has to wait for the right one of its pair, or is of the level `top`.
  void climb(Node node, int level, int64_t i, int top, Node* waiting, Node* result) {
    for (; level < top; ++level, i /= 2) {
      if (i % 2 == 0 && i + 1 < nodes(level)) {
        waiting[level] = node;
        return;
      }
      const Node left = i % 2 ? waiting[level] : node, right = i % 2 ? node : Node{0, -1};
      const double p[2] = {left.p, right.p};
      const int64_t items[2] = {left.item, right.item};
      int64_t one;
      if (meet(p, items, 1, coins_, first_[level] + i / 2, &node.p, &node.item, &one)) out_[one] = (T)1;
    }
    *result = node;
  }

  const T* p_;
  int64_t n_, first_[65];  // first_[l]: the first coin of the pairs of level l
  int levels_;
  Coins coins_;
  T* out_;
};

template <class T> void pivotal(const khot_draws& of, const uint8_t* is_whole, const int64_t* order,
                                int64_t order_stride, bool is_random, T* out) {
  const int64_t n = of.n;
  for_rows(of.draws * of.rows, n, of.threads, [&](int64_t r, int threads) {
    const int64_t row = r % of.rows, d = r / of.rows;
    const uint64_t key = row_key(of.seed, d, of.rows, row, of.is_paired), order_key = stream_key(key, 1);
    Tree<T> tree(static_cast<const T*>(of.p) + row * n, n, {stream_key(key, 2), of.is_paired && d % 2}, out + r * n);
    const auto draw = [&](auto place_all) { tree.draw(is_whole[row] != 0, threads, place_all); };
    if (is_random && n <= kSorted) {
      draw([=](int64_t, int64_t, int64_t* items) { sorted_order(order_key, n, items); });
    } else if (is_random) {
      const Rounds rounds(order_key, n);
      draw([=](int64_t begin, int64_t count, int64_t* items) { shuffled_order(rounds, n, begin, count, items); });
    } else if (order) {
      const int64_t* given = order + row * order_stride;
      draw([=](int64_t begin, int64_t count, int64_t* items) { std::copy_n(given + begin, count, items); });
    } else {
      draw([](int64_t begin, int64_t count, int64_t* items) {
        for (int64_t i = 0; i < count; ++i) items[i] = begin + i;
      });
    }
  });
}

// ── systematic ───────────────────────────────────────────────────────────────────────────────────────────────────────
constexpr int64_t kUnits = 512;  // items that are done at once

// The probabilities of a row in units of 1/one, and how what rounding leaves of the size is spread over them: in
// proportion to a measure, either p(1 − p) or the room that each item has.
struct Spread {
  int64_t one, lack, total;  // of the measure
  bool by_room;
};

template <class T>
inline void rounded_units(double one, const T* p, int64_t n, int64_t* __restrict weights, int64_t* __restrict measures) {
  double x[kUnits];
  for (int64_t i = 0; i < n; ++i) x[i] = p[i] > 0 ? (double)p[i] : 0;  // as `inside_unit`, but a loop for each line:
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 1 ? x[i] : 1;          // together they would be branches
  for (int64_t i = 0; i < n; ++i) {
    weights[i] = rounded(x[i] * one);
    measures[i] = rounded(x[i] * (1 - x[i]) * one);
  }
}
KHOT_CLONES void some_units(double one, const float* p, int64_t n, int64_t* weights, int64_t* measures) {
  rounded_units(one, p, n, weights, measures);
}
KHOT_CLONES void some_units(double one, const double* p, int64_t n, int64_t* weights, int64_t* measures) {
  rounded_units(one, p, n, weights, measures);
}

// Calls body(begin, count, weights, measures) for blocks of the items from `begin` to `end`.
template <class T, class Body> void for_units(const Spread& spread, const T* p, int64_t begin, int64_t end, Body body) {
  int64_t weights[kUnits], measures[kUnits];
  for (; begin < end; begin += kUnits) {
    const int64_t count = std::min(kUnits, end - begin);
    some_units((double)spread.one, p + begin, count, weights, measures);
    if (spread.by_room)
      for (int64_t i = 0; i < count; ++i) {
        const int64_t w = weights[i];
        measures[i] = w == 0 || w == spread.one ? 0 : spread.lack > 0 ? spread.one - w : w;
      }
    body(begin, count, weights, measures);
  }
}

// How many ones there are up to each item, from the running sums of weights and measures.
KHOT_CLONES void ones_until(const Spread& spread, int shift, int64_t count, const int64_t* __restrict weights,
                            const int64_t* __restrict measures, int64_t* __restrict until) {
  const int64_t lack = spread.lack, total = spread.total;
  const int64_t least = std::min<int64_t>(lack, 0), most = std::max<int64_t>(lack, 0);
  const double factor = (double)lack / (double)std::max<int64_t>(total, 1);
  const bool is_small = most - least < (int64_t)1 << 50;
  for (int64_t i = 0; i < count; ++i) {
    const double share = as_number((uint64_t)measures[i]) * factor;
    int64_t given = is_small ? small_floor(share) : floored(share);
    given = given < least ? least : given;
    given = given > most ? most : given;
    given = measures[i] >= total ? lack : given;
    until[i] = (int64_t)((uint64_t)(weights[i] + given) >> shift);
  }
}

// Draws every sample of the rows. The running sums are integers, so that parts of a row may be summed on their own.
template <class T> void systematic(const khot_draws& of, const double* k, T* out) {
  const int64_t n = of.n, rows = of.rows;
  const int shift = std::min(52, 62 - bit_length((uint64_t)n));
  for_rows(rows, n, of.threads, [&](int64_t row, int threads) {
    const T* p = static_cast<const T*>(of.p) + row * n;
    Spread spread = {(int64_t)1 << shift, 0, 0, false};
    struct Sums {
      int64_t weight, measure;
    } parts[kMostParts], all;
    const auto add_up = [&] {  // parts[i] becomes the sums before part i
      for_parts(n, threads, [&](int64_t part, int64_t begin, int64_t end) {
        Sums sums = {0, 0};
        for_units(spread, p, begin, end, [&](int64_t, int64_t count, const int64_t* weights, const int64_t* measures) {
          for (int64_t i = 0; i < count; ++i) sums.weight += weights[i], sums.measure += measures[i];
        });
        parts[part] = sums;
      });
      all = {0, 0};
      for (int64_t i = 0; i << part_bits(n) < n; ++i) {
        std::swap(all, parts[i]);
        all = {all.weight + parts[i].weight, all.measure + parts[i].measure};
      }
    };
    add_up();
    const double size = k[row] > 0 ? std::min(k[row], (double)n) : 0;  // the caller sees to it; a number in any case
    spread.lack = (int64_t)std::nearbyint(size * (double)spread.one) - all.weight;
    spread.by_room = std::abs(spread.lack) > all.measure;
    if (spread.by_room) add_up();
    spread.total = all.measure;
    for (int64_t d = 0; d < of.draws; ++d) {
      const uint64_t turn = of.is_paired && d % 2 ? (uint64_t)spread.one / 2 : 0;
      const auto start = (int64_t)((row_key(of.seed, d, rows, row, of.is_paired) + turn) & (uint64_t)(spread.one - 1));
      T* chosen = out + (d * rows + row) * n;
      for_parts(n, threads, [&](int64_t part, int64_t begin, int64_t end) {
        Sums sums = {parts[part].weight + start, parts[part].measure};
        int64_t until[kUnits + 1] = {0};
        if (part) ones_until(spread, shift, 1, &sums.weight, &sums.measure, until);
        for_units(spread, p, begin, end, [&](int64_t at, int64_t count, int64_t* weights, int64_t* measures) {
          for (int64_t i = 0; i < count; ++i) {
            weights[i] = sums.weight += weights[i];
            measures[i] = sums.measure += measures[i];
          }
          ones_until(spread, shift, count, weights, measures, until + 1);
          for (int64_t i = 0; i < count; ++i) chosen[at + i] = (T)(int32_t)(until[i + 1] - until[i]);
          until[0] = until[count];
        });
      });
    }
  });
}

}  // namespace

void khot_pivotal(const khot_draws* draws, const uint8_t* is_whole, const int64_t* order, int64_t order_stride,
                  int is_random, void* out) noexcept {
  if (draws->dtype == KHOT_FLOAT)
    return pivotal(*draws, is_whole, order, order_stride, is_random != 0, static_cast<float*>(out));
  pivotal(*draws, is_whole, order, order_stride, is_random != 0, static_cast<double*>(out));
}

void khot_systematic(const khot_draws* draws, const double* k, void* out) noexcept {
  if (draws->dtype == KHOT_FLOAT) return systematic(*draws, k, static_cast<float*>(out));
  systematic(*draws, k, static_cast<double*>(out));
}

void khot_uniform(int64_t seed, int64_t stream, int64_t count, int threads, double* out) noexcept {
  const uint64_t key = stream_key((uint64_t)seed, (uint64_t)stream);
  for_rows((count + kChunk - 1) / kChunk, kChunk, threads,
           [&](int64_t chunk, int) { uniforms(key, chunk * kChunk, std::min(count, (chunk + 1) * kChunk), out); });
}

void khot_order(const int64_t* keys, int64_t rows, int64_t n, int threads, int64_t* out) noexcept {
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    const auto key = (uint64_t)keys[r];
    if (n <= kSorted) return sorted_order(key, n, out + r * n);
    const Rounds rounds(key, n);
    for_parts(n, share, [&](int64_t, int64_t begin, int64_t end) {
      shuffled_order(rounds, n, begin, end - begin, out + r * n + begin);
    });
  });
}
