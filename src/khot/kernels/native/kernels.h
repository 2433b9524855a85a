// What one build of the kernels offers; the dispatcher fills a table per instruction set.
#pragma once

#include <cstdint>

#include "khot.h"

namespace khot {

constexpr int64_t kShort = 256, kGrouped = 4096;  // the longest rows for `sure_group`, and for `quick_group`
constexpr int64_t kAhead = 32768;  // the longest rows that are fetched before they are solved
constexpr int kMostRows = 16;  // of a group
constexpr int kMostTrees = 8;  // side by side
constexpr int64_t kTiny = 16;  // the longest rows for `hard_short`

// τ = anchor + T·shift.
template <class T> struct Threshold {
  T anchor, shift;
};

// The same, solved for.
struct Root {
  double anchor, shift;
};

// What is wanted of a row of 16 bits beside y as floats.
struct Kept {
  Root root;         // at which a derivative may be taken; not written if the row has none that is finite
  int32_t dtype;     // of `x` and `y`
  const uint16_t* x; // (n), the scores; null: they are in the row's x, which is not written yet otherwise
  uint16_t* y;       // (n), written if it costs nothing
  bool has_written;  // whether it was
  bool goes_past;    // whether it is to be written past the cache
};

template <class T> struct Row {
  const T* x;
  const uint8_t* mask;  // null: all allowed
  int64_t mask_stride, n;
  double k, temperature;
  int threads;  // to split this one row over
  double exponent;  // of a power
  Kept* kept;       // null: nothing beside y
  const T* costs;   // null: 1
  int32_t ahead;    // the next row is so many scores further on, and is to be fetched meanwhile; 0: it is not
  bool is_sharp;    // whether the quick way has failed
  bool goes_past;   // whether a gradient is to be written past the cache
};

// A signal that is to be coded, and where its code goes.
template <class T> struct Signal {
  const T* gram;  // n × n
  int64_t n, slots, count;
  double square, enough, noise;
  T* alpha;        // (n), overwritten
  int64_t* atoms;  // (slots)
  T* coefs;        // (slots), zeros
  uint8_t* is_close;
};

// What `pursue` works with, for `slots` atoms.
template <class T> struct Room {
  double *inverse, *lower;  // slots × slots, and slots
  const T** rows;
  T* by;
};

// The keys of one head in cells, and their values; see khot_cells.
template <class T> struct Cells {
  const T *keys, *centre, *radius, *share, *values;
  const int64_t *index, *counts;
  int64_t used, bounded, size, d, e, value_stride, limit;
};

template <class T> struct Query {
  const T* x;
  const uint8_t* mask;    // (n); null: all allowed
  double epsilon, slack;  // a score may be off by slack · ‖x‖
};

struct Cell {
  double mass;  // a bound; at first the score of the mean
  int64_t at, some;
};

struct Key {
  double mass;
  int64_t at;
};

// Sort by falling mass; or bring the `middle` largest of m to the front. Compiled once for every machine (select.cpp).
void sort_falling(Cell* cells, int64_t m);
void part_falling(Key* keys, int64_t middle, int64_t m);

// What `attend` works with.
struct Opened {
  Cell* cells;   // (used)
  double* rest;  // (used + 1)
  Key* keys;     // (used · size)
};

struct Found {
  int64_t k, scored;
  double bound;
  uint8_t is_refused;
};

// A row's scores and their cotangent, that of y, in 16 bits.
struct Halves {
  int32_t dtype;
  const uint16_t *x, *g;
  uint16_t* dx;
};

constexpr int64_t kPad = 16;  // zeros on both sides of what `convolve` takes and gives

// Where the nodes of 2^level leaves begin in a tree over 2^bits of them, in vectors.
static constexpr int64_t tree_level(int bits, int level) {
  return ((int64_t)level << bits) + ((int64_t)2 << bits) - ((int64_t)2 << (bits - level));
}

template <class T> struct Kernels {
  // One row of a soft top-k, by cdf; null: there is no such kernel.
  void (*row[KHOT_CDFS])(const Row<T>& row, T* y);
  // Up to `group` rows of σ_k at once, all of one length: the quick way for up to kGrouped scores, and the sure way for up to
  // kShort, whose results do not depend on which rows come together. There are `group` rows, of which the first `count`
  // differ. A bit set in the result is a row that is not solved. 0 and null: there is no such way.
  int group;
  unsigned (*quick_group)(const Row<T>* rows, int count, T* const* y);
  unsigned (*sure_group)(const Row<T>* rows, int count, T* const* y);
  // z = (x − τ)/T of one row; false if it is left to another method.
  bool (*margin)(const Row<T>& row, T* z);
  // Ones at the k largest.
  void (*hard)(const Row<T>& row, T* out);
  // The same of `count` rows of up to kTiny scores, from row `first` on.
  void (*hard_short)(const khot_rows& rows, int64_t first, int64_t count, T* out);
  // The derivative of one row, by cdf: row.x is y, dx (n); returns dk.
  double (*pull[KHOT_CDFS])(const Row<T>& row, const T* g, T* dx);
  // The same of `count` ≤ `group` rows of up to kShort entries; dk has room for a group. Null: there is no such way.
  void (*pull_short[KHOT_CDFS])(const Row<T>* rows, int count, const T* const* g, T* const* dx, double* dk);
  // One row with costs, by cdf: y or its margins, false if it is left to another method; and the derivative, as above.
  bool (*cost_row[KHOT_CDFS])(Row<T> row, bool gives_margins, T* out);
  double (*cost_pull[KHOT_CDFS])(const Row<T>& row, const T* g, T* dx);
  // The same of a group of rows of up to kShort entries, as `sure_group` and `pull_short`. Null: there is no such way.
  unsigned (*cost_group[KHOT_CDFS])(const Row<T>* rows, bool gives_margins, T* const* out);
  void (*cost_pull_short[KHOT_CDFS])(const Row<T>* rows, int count, const T* const* g, T* const* dx, double* dk);
  // Orthogonal matching pursuit of one signal; returns how many atoms it took.
  int64_t (*pursue)(const Signal<T>& signal, const Room<T>& room);
  // Statistical top-k of one row, whose k is the multiplier of the deviation, or a count if it is exact; returns the
  // threshold.
  double (*statistical)(const Row<T>& row, double smooth, bool is_exact, T* y);
  // Sums and values at a given threshold, by cdf.
  void (*sums_at[KHOT_CDFS])(const Row<T>& row, const Threshold<T>& tau, double* sums);
  void (*value_at[KHOT_CDFS])(const Row<T>& row, const Threshold<T>& tau, T give, T* y);
  // log σ_k of one row, its threshold, dx for the cotangent of the logarithm or (g null) of the threshold, and the
  // cross-entropy with its derivative (infinity: left); false if the row is left to another method. Null: no such kernel.
  bool (*log)(const Row<T>& row, T* y, Root* root);
  bool (*root)(const Row<T>& row, T* scratch, Root* root);
  bool (*log_pull)(const Row<T>& row, const Root& root, const T* g, double mass, T* dx);
  double (*loss)(Row<T> row, const T* target, T* dx);
  // Attention of one query; output (e) and head (n), zeros, may be null.
  Found (*attend)(const Cells<T>& cells, const Query<T>& query, const Opened& room, T* output, uint8_t* head);
  // n numbers of 16 bits to T, and back; null but for float.
  void (*widen)(int32_t dtype, const uint16_t* from, int64_t n, int threads, T* to);
  void (*narrow)(int32_t dtype, const T* from, int64_t n, int threads, uint16_t* to);
  // The derivative of one row of 16 bits at its root, by cdf: x instead of row.x; `room` has n places.
  void (*half_pull[KHOT_CDFS])(const Row<T>& row, const Halves& halves, const Root& root, T* room);
  // The constants of Pareto's law; false if the row is left to another method. Null but for double, as what follows.
  bool (*pareto)(const double* theta, int64_t n, double k, int threads, double* c);
  // The characteristic function of a count at some points, complex, where their weight is not 0; and sums over points of
  // what it is without one item, times weights.
  void (*count_products)(const double* p, int64_t n, const double* step, const double* weight, int points, int threads,
                         double* product);
  void (*count_rests)(const double* p, int64_t n, const double* step, const double* weight, int points, int threads,
                      double* same, double* less);
  // Distributions of counts in `trees` small trees side by side, and in a larger node from those of two below.
  int trees;
  void (*grow_trees)(const double* const* leaves, const int64_t* counts, int bits, int64_t most, double* tree);
  void (*convolve)(const double* a, int64_t na, const double* b, int64_t nb, double* out);
};

extern const Kernels<float> portable_float;
extern const Kernels<double> portable_double;
#ifdef KHOT_X86
extern const Kernels<float> avx2_float;
extern const Kernels<double> avx2_double;
extern const Kernels<float> avx512_float;
extern const Kernels<double> avx512_double;
#endif

}  // namespace khot
