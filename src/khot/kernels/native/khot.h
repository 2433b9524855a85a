/* The C interface of khot's native CPU library: rows in, rows out, plain pointers.
 *
 * The library, the fuzz program and (through ctypes) khot/kernels/_native.py share this file. A hash of its text is the
 * library's ABI number, so Python refuses a library that was built from another version of it. No function throws.
 */
#ifndef KHOT_H
#define KHOT_H

#include <stdint.h>

#ifdef __cplusplus
#define KHOT_NOEXCEPT noexcept
extern "C" {
#else
#define KHOT_NOEXCEPT
#endif
#define KHOT_API __attribute__((visibility("default")))

enum { KHOT_OK = 0, KHOT_NO_MEMORY = 1 };  /* status of a call */
enum { KHOT_FLOAT = 0, KHOT_DOUBLE = 1 };  /* dtype: float or double, for every `void*` of a call */
enum { KHOT_BFLOAT16 = 2, KHOT_HALF = 3 }; /* or 16 bits, for the functions that say so */
enum { KHOT_PORTABLE = 0, KHOT_AVX2 = 1, KHOT_AVX512 = 2 }; /* path: the widest vectors that a call may use */
/* cdf; the last three: floats */
enum { KHOT_SIGMOID, KHOT_LAPLACE, KHOT_EUCLIDEAN, KHOT_NORMAL, KHOT_CAUCHY, KHOT_POWER, KHOT_CDFS };

/* Contiguous rows of scores, and how each is to be solved. */
typedef struct {
  const void* x; /* rows × n */
  int64_t rows, n;
  const double* k; /* one number per row, at k[r * k_stride]; null: k_of_all for all rows */
  int64_t k_stride;
  const double* temperature; /* likewise */
  int64_t temperature_stride;
  const uint8_t* mask; /* entry i of row r is mask[r * mask_row_stride + i * mask_stride]; null: all may be chosen */
  int64_t mask_row_stride, mask_stride;
  double k_of_all, temperature_of_all;
  int32_t dtype, threads, path, cdf;
  double exponent; /* of KHOT_POWER, F(z) = clip(z, 0, 1)^exponent: from 1 to 4 */
  const void* costs; /* entry i of row r at costs[r * costs_row_stride + i], for the functions that say so; null: 1 */
  int64_t costs_row_stride;
} khot_rows;

/* Contiguous rows of inclusion probabilities, and how many samples of each are to be drawn. */
typedef struct {
  const void* p; /* rows × n */
  int64_t rows, n, seed, draws;
  int32_t is_paired, dtype, threads;
} khot_draws;

/* Signals to be coded over a dictionary of n atoms, a number of each kind per signal. */
typedef struct {
  const void* gram; /* n × n, finite */
  int64_t rows, n, slots;
  const int64_t* counts; /* the most atoms of a signal, at most `slots` */
  const double* square;  /* of its norm */
  const double* enough;  /* stop once the square of the residual is at most this */
  const double* noise;   /* and once that of the next correlation is at most this, times the square of the atom */
  int32_t dtype, threads, path;
} khot_signals;

/* Heads of keys in cells, `used` of `room` each, and queries that search them; -1 in `index` is no key. Of the cells
 * used, those after the first `bounded` have no means, radii and shares, and are always opened. */
typedef struct {
  const void* q;         /* heads × rows × d, scaled */
  const void* keys;      /* heads × room × size × d */
  const void* centre;    /* heads × room × d: the means */
  const void* radius;    /* heads × room: no key is farther from its mean */
  const void* share;     /* heads × room: a bound on the variance in any direction, divided by the radius squared */
  const int64_t* index;  /* heads × room × size: where the keys are in the cache, below n */
  const int64_t* counts; /* heads × room: the keys of a cell */
  const void* values;    /* heads × n × e, with the strides below; may be null if there is no output */
  const uint8_t* mask;   /* heads × rows × n; null: all may be attended to */
  const double* epsilon; /* heads × rows */
  const void* largest;   /* heads: no key is longer */
  double slack;          /* a score may be off by this, times the lengths of the query and the longest key */
  int64_t heads, rows, d, room, used, bounded, size, n, e, value_head_stride, value_stride, limit;
  int32_t dtype, threads, path;
} khot_cells;

/* The hash of this file that the library was built with. */
KHOT_API uint32_t khot_abi(void) KHOT_NOEXCEPT;

/* The widest path that a call may use here: that of this machine, or a narrower one to which all calls are held, as tests
 * and benchmarks do. */
KHOT_API int khot_path(void) KHOT_NOEXCEPT;
KHOT_API void khot_hold(int path) KHOT_NOEXCEPT;

/* y = F((x − τ)/T) with Σy = k; a row that cannot be satisfied is NaN. */
KHOT_API void khot_topk(const khot_rows* rows, void* y) KHOT_NOEXCEPT;

/* With costs c: y = F((x/c − τ)/T) with Σ c·y = k; or if gives_margins, and x holds the scores per cost, (x − τ)/T.
 * is_left[r] is 1 for a row that is not solved, and is left to another method, as all are that have no finite threshold. */
KHOT_API void khot_cost_topk(const khot_rows* rows, int gives_margins, void* out, uint8_t* is_left) KHOT_NOEXCEPT;

/* z = (x − τ)/T of σ_k; is_left[r] is 1 for a row that is not written, and is left to another method. */
KHOT_API void khot_sigmoid_margin(const khot_rows* rows, void* z, uint8_t* is_left) KHOT_NOEXCEPT;

/* Functions of the thresholds of σ_k, anchor[r] + T·shift[r], of floats; is_left[r] is 1 for a row that is left to another
 * method, of which nothing is known. log σ_k, and the thresholds; y may be null, and then `scratch` has rows × n places.
 */
KHOT_API void khot_log_sigmoid(const khot_rows* rows, void* y, void* scratch, double* anchor, double* shift,
                               uint8_t* is_left) KHOT_NOEXCEPT;

/* dx for the cotangent g of that logarithm, or if g is null for that of the threshold, mass[r]. Reads no k. */
KHOT_API void khot_log_sigmoid_pull(const khot_rows* rows, const double* anchor, const double* shift, const void* g,
                                    const double* mass, void* dx, uint8_t* is_left) KHOT_NOEXCEPT;

/* T·Σ KL(y ‖ σ_k) for targets y, rows × n, of zeros and k ones, and its derivative σ_k − y. Reads no k. */
KHOT_API void khot_cross_entropy(const khot_rows* rows, const void* target, double* loss, void* dx,
                                 uint8_t* is_left) KHOT_NOEXCEPT;

/* At the thresholds anchor[r] + T·shift[r], not solved for: the number of scores above the median of F, Σ F below it,
 * Σ 1 − F above it, and Σ F′ below and above it; rows × 5. Reads no k and no mask. */
KHOT_API void khot_sums_at(const khot_rows* rows, const double* anchor, const double* shift, double* sums) KHOT_NOEXCEPT;

/* There too: y = F(z) + give[r]·F′(z), within [0, 1], with z = (x − anchor)/T − shift. Infinite scores are 0 or 1, also if
 * the shift is infinite. */
KHOT_API void khot_value_at(const khot_rows* rows, const double* anchor, const double* shift, const double* give,
                            void* y) KHOT_NOEXCEPT;

/* Ones at the k largest, ties by lowest index. Reads no temperature. */
KHOT_API void khot_hard_topk(const khot_rows* rows, void* out) KHOT_NOEXCEPT;

/* The derivative of khot_topk: `rows->x` holds y, g is its cotangent. dx is that of x, dk (may be null) that of k.
 * Reads no k and no mask. With costs, that of khot_cost_topk. */
KHOT_API void khot_topk_pull(const khot_rows* rows, const void* g, void* dx, double* dk) KHOT_NOEXCEPT;

/* khot_topk for rows of 16 bits, computed in float a few rows at a time and rounded once; and its derivative from the
 * scores and the roots: for each row an anchor and a shift, τ = anchor + T·shift, or NaN where the threshold is not
 * finite: then the row is solved again. They may be null in the first. */
KHOT_API int khot_half_topk(const khot_rows* rows, void* y, double* roots) KHOT_NOEXCEPT;
KHOT_API int khot_half_pull(const khot_rows* rows, const double* roots, const void* g, void* dx) KHOT_NOEXCEPT;

/* Statistical top-k: y = max(x − θ, 0), or its C¹ form if smooth > 0, with θ = mean + std·k, so that `k` is a
 * multiplier; or, if is_exact, with the (k + 1)-th largest score as θ. theta gets a number per row, which is not finite
 * where the scores, or the squares of their differences, are not. y may be null unless is_exact. Reads no temperature
 * and no mask. */
KHOT_API void khot_statistical(const khot_rows* rows, double smooth, int is_exact, void* y,
                               double* theta) KHOT_NOEXCEPT;

/* Pivotal samples, (draws · rows) × n. The tree's leaves are the items in the order given (row r's at
 * order + r * order_stride), in a random order of each sample's own, or as they come. */
KHOT_API void khot_pivotal(const khot_draws* draws, const uint8_t* is_whole, const int64_t* order, int64_t order_stride,
                          int is_random, void* out) KHOT_NOEXCEPT;

/* Systematic samples of the sizes k, (draws · rows) × n. */
KHOT_API void khot_systematic(const khot_draws* draws, const double* k, void* out) KHOT_NOEXCEPT;

/* `count` uniforms of one stream. */
KHOT_API void khot_uniform(int64_t seed, int64_t stream, int64_t count, int threads, double* out) KHOT_NOEXCEPT;

/* A random order of n items for each key, rows × n. */
KHOT_API void khot_order(const int64_t* keys, int64_t rows, int64_t n, int threads, int64_t* out) KHOT_NOEXCEPT;

/* The constants of Pareto's law for logits, rows × n, and the sizes k; is_left[r] is 1 for a row that is left to another
 * method. */
KHOT_API void khot_pareto_constants(const double* logits, int64_t rows, int64_t n, const double* k, int path, int threads,
                                    double* out, uint8_t* is_left) KHOT_NOEXCEPT;

/* The characteristic function of a sum of independent draws with the chances p, rows × n, at up to 32 points of each row:
 * Π (1 + p·step), complex, or 1 where the weight, a number per point, is 0. */
KHOT_API void khot_count_products(const double* p, int64_t rows, int64_t n, const double* step, const double* weight,
                                  int points, int path, int threads, double* product) KHOT_NOEXCEPT;

/* For each item, Σ Re(weight/(1 + p·step)) over the points, and Σ Re(weight·(1 + step)/(1 + p·step)); both complex. */
KHOT_API void khot_count_rests(const double* p, int64_t rows, int64_t n, const double* step, const double* weight,
                               int points, int path, int threads, double* same, double* less) KHOT_NOEXCEPT;

/* Samples of independent draws with the chances p, rows × n, given that they are k in number: `draws` × rows × n. A tree
 * shares the counts out; each of its levels takes the uniforms of one stream, as many streams from `stream` on for each
 * `group` of draws. */
KHOT_API int khot_sample_tree(const double* p, int64_t rows, int64_t n, const double* k, int64_t seed, int64_t stream,
                              int64_t draws, int64_t group, int path, int threads, double* out) KHOT_NOEXCEPT;

/* Orthogonal matching pursuit. alpha, rows × n, holds the correlations of signals and atoms, and is overwritten. Writes
 * the atoms and their coefficients, rows × slots, of which `taken` are used; coefs must be 0 before. is_close[r]
 * becomes 1 if atoms of a signal are so alike that its coefficients have lost digits. */
KHOT_API int khot_pursue(const khot_signals* signals, void* alpha, int64_t* atoms, void* coefs, int64_t* taken,
                         uint8_t* is_close) KHOT_NOEXCEPT;

/* Attention of each query to as few keys as are certified to have all but ε of the mass. At most `limit` cells are
 * opened; a query that needs more is refused, and attends to all its keys. Writes the output, heads × rows × e, numbers
 * for each query, and 1 to the keys of its head, heads × rows × n, which must be 0 before. output and head may be null.
 */
KHOT_API int khot_attend(const khot_cells* cells, void* output, int64_t* k, double* bound, int64_t* scored,
                         uint8_t* is_refused, uint8_t* head) KHOT_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif
