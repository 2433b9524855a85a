// The entry points for samples of maximum entropy: Pareto's constants, and counts shared out along a tree.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "dispatch.h"
#include "words.h"

namespace {

constexpr int kBlockBits = 6;           // the lowest levels of the tree are made twice, and never stored
constexpr double kNegligible = 1e-20;  // chances of counts that are dropped

// The chances of `low`, `low` + 1, … ones among the leaves of a node.
struct Window {
  double* mass;
  int64_t low, length;
};

// The nodes of 2^l leaves.
struct Level {
  std::unique_ptr<double[]> mass;
  std::unique_ptr<Window[]> nodes;
  int64_t count = 0;
};

// The streams of the levels of a group of draws, and the places of coins in them.
struct Coins {
  uint64_t seed;
  int64_t stream, group, rows;
  int height;
  uint64_t key(int64_t draw, int level) const {
    return stream_key(seed, (uint64_t)(stream + draw / group * height + (height - 1 - level)));
  }
  int64_t place(int64_t draw, int64_t row, int level) const {
    return (draw % group * rows + row) << (height - 1 - level);
  }
};

// Shares `count` out to a node and the one to its right; first and last bound what the left one can get, as far as their
// chances are known. p are the chances of their leaves.
template <class Left, class Right>
int64_t share(int64_t count, int64_t first, int64_t last, double u, Left left, Right right, const double* p,
              int64_t in_left, int64_t in_right) {
  double total = 0;
  for (int64_t j = first; j <= last; ++j) total += left(j) * right(count - j);
  const double coin = u * total;
  double running = 0;
  for (int64_t j = first; j <= last; ++j) {
    running += left(j) * right(count - j);
    if (running > coin) return j;
  }
  // The chances have underflowed. Items that are certain decide.
  int64_t least[2] = {0, 0}, most[2] = {0, 0};
  for (int64_t i = 0; i < in_left + in_right; ++i) {
    least[i >= in_left] += p[i] == 1;
    most[i >= in_left] += p[i] > 0;
  }
  int64_t chosen = std::max(std::min(most[0], count - least[1]), least[0]);
  chosen = std::max(chosen, count - most[1]);
  return std::max(std::min({chosen, count, in_left}), std::max<int64_t>(count - in_right, 0));
}

class Forest {
 public:
  Forest(const khot::Kernels<double>& table, const double* p, int64_t rows, int64_t n, const double* k, Coins coins,
         int64_t draws, double* out)
      : table_(table), p_(p), rows_(rows), n_(n), k_(k), coins_(coins), draws_(draws), out_(out),
        bits_(std::min(coins.height, kBlockBits)), size_((int64_t)1 << bits_), blocks_((n + size_ - 1) >> bits_) {
    for (int64_t r = 0; r < rows; ++r) most_ = std::max(most_, size_of(r));
    stride_ = std::min(size_, most_) + 1 + 2 * khot::kPad;
  }

  int draw(int threads) {
    ones_.reset(new (std::nothrow) int64_t[(size_t)(draws_ * rows_ * blocks_)]);
    if (!ones_) return KHOT_NO_MEMORY;
    std::atomic<int> status{KHOT_OK};
    if (blocks_ > 1) {
      roots_.reset(new (std::nothrow) double[(size_t)(rows_ * blocks_ * stride_)]);
      if (!roots_) return KHOT_NO_MEMORY;
      for_groups(threads, [&](int64_t first) { keep_roots(first); });
      const bool split = rows_ < threads && n_ >= kSplit;
      for_rows(rows_, n_, threads, [&](int64_t r, int) {
        if (!share_row(r, split ? threads : 1)) status = KHOT_NO_MEMORY;
      });
    } else {
      for (int64_t i = 0; i < draws_ * rows_; ++i) ones_[(size_t)i] = size_of(i % rows_);
    }
    if (status == KHOT_OK) for_groups(threads, [&](int64_t first) { finish(first); });
    return status;
  }

 private:
  int64_t size_of(int64_t r) const { return k_[r] > 0 ? (int64_t)std::min(k_[r], (double)n_) : 0; }
  int64_t leaves_of(int level, int64_t node) const {
    return std::max<int64_t>(std::min(n_ - (node << level), (int64_t)1 << level), 0);
  }

  template <class Body> void for_groups(int threads, Body body) {
    const int64_t group = table_.trees, count = (rows_ * blocks_ + group - 1) / group;
    for_rows(count, group * size_, threads, [&](int64_t g, int) { body(g * group); });
  }

  // The trees over the blocks from `first` on.
  void grow(int64_t first, double* tree) const {
    const double* leaves[khot::kMostTrees];
    int64_t counts[khot::kMostTrees];
    for (int lane = 0; lane < table_.trees; ++lane) {
      const int64_t b = std::min(first + lane, rows_ * blocks_ - 1);
      leaves[lane] = p_ + b / blocks_ * n_ + b % blocks_ * size_;
      counts[lane] = leaves_of(bits_, b % blocks_);
    }
    table_.grow_trees(leaves, counts, bits_, most_, tree);
  }

  void keep_roots(int64_t first) {
    const int64_t w = table_.trees, length = stride_ - 2 * khot::kPad;
    alignas(64) double tree[kTree];
    grow(first, tree);
    const double* root = tree + khot::tree_level(bits_, bits_) * w;
    for (int64_t lane = 0; lane < w && first + lane < rows_ * blocks_; ++lane) {
      double* mass = &roots_[(size_t)((first + lane) * stride_)];
      std::memset(mass, 0, (size_t)stride_ * sizeof(double));
      for (int64_t j = 0; j < length; ++j) mass[khot::kPad + j] = root[j * w + lane];
    }
  }

  // Drops counts that are more than k or negligible.
  void trim(Window* node) const {
    double* mass = node->mass;
    int64_t length = node->length, dropped = 0;
    for (; length > 1 && (node->low + length - 1 > most_ || !(mass[length - 1] > kNegligible)); --length)
      mass[length - 1] = 0;
    for (; dropped < length - 1 && !(mass[dropped] > kNegligible); ++dropped) mass[dropped] = 0;
    *node = {mass + dropped, node->low + dropped, length - dropped};
  }

  // The level above one.
  bool add_level(const Level& below, Level* above, int threads) const {
    const int64_t count = above->count = (below.count + 1) / 2;
    above->nodes.reset(new (std::nothrow) Window[(size_t)count]);
    if (!above->nodes) return false;
    int64_t room = 0;
    for (int64_t i = 0; 2 * i + 1 < below.count; ++i)
      room += below.nodes[(size_t)(2 * i)].length + below.nodes[(size_t)(2 * i + 1)].length + 2 * khot::kPad;
    above->mass.reset(new (std::nothrow) double[(size_t)room]);
    if (!above->mass) return false;
    double* place = above->mass.get();
    for (int64_t i = 0; i < count; ++i) {
      const Window* pair = &below.nodes[(size_t)(2 * i)];
      if (2 * i + 1 == below.count) {
        above->nodes[(size_t)i] = *pair;
        break;
      }
      above->nodes[(size_t)i] = {place + khot::kPad, pair[0].low + pair[1].low, pair[0].length + pair[1].length - 1};
      place += pair[0].length + pair[1].length + 2 * khot::kPad;
    }
    for_rows(below.count / 2, n_ / count, threads, [&](int64_t i, int) {
      const Window *pair = &below.nodes[(size_t)(2 * i)], node = above->nodes[(size_t)i];
      std::memset(node.mass - khot::kPad, 0, (size_t)(node.length + 1 + 2 * khot::kPad) * sizeof(double));
      table_.convolve(pair[0].mass, pair[0].length, pair[1].mass, pair[1].length, node.mass);
      trim(&above->nodes[(size_t)i]);
    });
    return true;
  }

  // How many ones each block of a row gets in each draw. False if there is no memory.
  bool share_row(int64_t row, int threads) {
    Level levels[64];
    const int heights = coins_.height - bits_;  // the root is not needed
    levels[0].count = blocks_;
    levels[0].nodes.reset(new (std::nothrow) Window[(size_t)blocks_]);
    if (!levels[0].nodes) return false;
    for (int64_t b = 0; b < blocks_; ++b) {
      levels[0].nodes[(size_t)b] = {&roots_[(size_t)((row * blocks_ + b) * stride_ + khot::kPad)], 0,
                                    stride_ - 2 * khot::kPad};
      trim(&levels[0].nodes[(size_t)b]);
    }
    for (int h = 1; h < heights; ++h)
      if (!add_level(levels[h - 1], &levels[h], threads)) return false;
    const std::unique_ptr<int64_t[]> room(new (std::nothrow) int64_t[(size_t)blocks_]);
    if (!room) return false;
    for (int64_t d = 0; d < draws_; ++d) {
      int64_t *now = &ones_[(size_t)((d * rows_ + row) * blocks_)], *next = room.get();
      if (heights % 2) std::swap(now, next);  // the last level goes to its place
      now[0] = size_of(row);
      for (int h = heights - 1; h >= 0; --h) {
        const Level& level = levels[h];
        const uint64_t key = coins_.key(d, bits_ + h);
        const int64_t place = coins_.place(d, row, bits_ + h);
        for_rows((level.count + 1) / 2, n_ / level.count, threads, [&](int64_t i, int) {
          const int64_t count = now[i];
          next[2 * i] = count;
          if (2 * i + 1 == level.count) return;
          if (count) next[2 * i] = share_pair(row, bits_ + h, i, &level.nodes[(size_t)(2 * i)], count,
                                              unit(word_at(key, place + i)));
          next[2 * i + 1] = count - next[2 * i];
        });
        std::swap(now, next);
      }
    }
    return true;
  }

  int64_t share_pair(int64_t row, int level, int64_t i, const Window* pair, int64_t count, double u) const {
    const Window left = pair[0], right = pair[1];
    return share(
        count, std::max(left.low, count - (right.low + right.length - 1)),
        std::min(left.low + left.length - 1, count - right.low), u, [=](int64_t j) { return left.mass[j - left.low]; },
        [=](int64_t j) { return right.mass[j - right.low]; }, p_ + row * n_ + (2 * i << level), leaves_of(level, 2 * i),
        leaves_of(level, 2 * i + 1));
  }

  // Shares the ones of blocks out to their leaves.
  void finish(int64_t first) const {
    const int64_t w = table_.trees, last = std::min(first + w, rows_ * blocks_);
    alignas(64) double tree[kTree];
    bool is_grown = false;
    for (int64_t d = 0; d < draws_; ++d)
      for (int64_t b = first; b < last; ++b) {
        const int64_t row = b / blocks_, block = b % blocks_, leaves = leaves_of(bits_, block);
        double* out = out_ + (d * rows_ + row) * n_ + block * size_;
        int64_t counts[(size_t)1 << kBlockBits] = {ones_[(size_t)((d * rows_ + row) * blocks_ + block)]};
        if (counts[0] && !is_grown) grow(first, tree);
        is_grown |= counts[0] != 0;
        if (counts[0]) share_block(d, row, block, tree + (b - first), counts);
        for (int64_t i = 0; i < leaves; ++i) out[i] = (double)counts[i];
      }
  }

  void share_block(int64_t draw, int64_t row, int64_t block, const double* tree, int64_t* counts) const {
    const int64_t w = table_.trees;
    for (int level = bits_ - 1; level >= 0; --level) {
      const int64_t nodes = (int64_t)1 << (bits_ - 1 - level), size = (int64_t)1 << level;
      const double* masses = tree + khot::tree_level(bits_, level) * w;
      const uint64_t key = coins_.key(draw, level);
      const int64_t place = coins_.place(draw, row, level) + block * nodes, base = block * size_;
      for (int64_t i = nodes - 1; i >= 0; --i) {
        const int64_t count = counts[i], at = base + 2 * i * size;
        const double *left = masses + 2 * i * (size + 1) * w, *right = left + (size + 1) * w;
        const int64_t in_left = std::max<int64_t>(std::min(n_ - at, size), 0);
        const int64_t in_right = std::max<int64_t>(std::min(n_ - at - size, size), 0);
        counts[2 * i] = !count ? 0
                               : share(
                                     count, std::max<int64_t>(count - in_right, 0), std::min(count, in_left),
                                     unit(word_at(key, place + i)), [=](int64_t j) { return left[j * w]; },
                                     [=](int64_t j) { return right[j * w]; }, p_ + row * n_ + at, in_left, in_right);
        counts[2 * i + 1] = count - counts[2 * i];
      }
    }
  }

  static constexpr int64_t kTree = (khot::tree_level(kBlockBits, kBlockBits) + (1 << kBlockBits) + 1) * khot::kMostTrees;

  const khot::Kernels<double>& table_;
  const double* p_;
  int64_t rows_, n_;
  const double* k_;
  Coins coins_;
  int64_t draws_;
  double* out_;
  int bits_;
  int64_t size_, blocks_, most_ = 0, stride_ = 0;
  std::unique_ptr<double[]> roots_;
  std::unique_ptr<int64_t[]> ones_;
};

}  // namespace

void khot_pareto_constants(const double* logits, int64_t rows, int64_t n, const double* k, int path, int threads,
                           double* out, uint8_t* is_left) noexcept {
  expect(out, rows * n * (int64_t)sizeof(double), threads);
  const auto& table = kernels(path, double());
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    is_left[r] = !table.pareto(logits + r * n, n, k[r], share, out + r * n);
  });
}

void khot_count_products(const double* p, int64_t rows, int64_t n, const double* step, const double* weight, int points,
                         int path, int threads, double* product) noexcept {
  const auto& table = kernels(path, double());
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    const int64_t at = r * points;
    table.count_products(p + r * n, n, step + 2 * at, weight + at, points, share, product + 2 * at);
  });
}

void khot_count_rests(const double* p, int64_t rows, int64_t n, const double* step, const double* weight, int points,
                      int path, int threads, double* same, double* less) noexcept {
  const auto& table = kernels(path, double());
  for_rows(rows, n, threads, [&](int64_t r, int share) {
    const int64_t at = 2 * r * points;
    table.count_rests(p + r * n, n, step + at, weight + at, points, share, same + r * n, less + r * n);
  });
}

int khot_sample_tree(const double* p, int64_t rows, int64_t n, const double* k, int64_t seed, int64_t stream,
                     int64_t draws, int64_t group, int path, int threads, double* out) noexcept {
  expect(out, draws * rows * n * (int64_t)sizeof(double), threads);
  const Coins coins = {(uint64_t)seed, stream, group, rows, bit_length((uint64_t)(n - 1))};
  return Forest(kernels(path, double()), p, rows, n, k, coins, draws, out).draw(threads);
}
