// A part of a row at a given threshold: the sums of both sides of F there, and the values. In vectors of the compiler's
// own, of 16 bytes for the baseline of the machine and of 32 for AVX2.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "khot.h"
#include "parallel.h"

#define KHOT_INLINE __attribute__((always_inline))  // as an AVX2 function cannot be inlined, but what it calls must be
#pragma GCC diagnostic ignored "-Wpsabi"            // vectors are passed between inlined functions alone

namespace {

constexpr int64_t kBlock = 512;  // so many numbers are added in their own precision, then in double
constexpr int kSums = 5;

// A threshold is anchor + T·shift.
template <class T> struct Point {
  T anchor, temperature, shift;
};

// How e^r is summed: 2^m is split off by adding `round`, whose lowest bits become the integer m.
template <class T> struct Exp;
template <> struct Exp<float> {
  static constexpr float least = -87, round = 12582912, high = 0.693145752f, low = 1.42860677e-6f;
  static constexpr int shift = 23, bias = 127, terms = 7;
};
template <> struct Exp<double> {
  static constexpr double least = -708, round = 6755399441055744, high = 0.693147180369123816, low = 1.9082149292705877e-10;
  static constexpr int shift = 52, bias = 1023, terms = 13;
};

template <class T, int Size> struct Vectors {
  using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef T Reg __attribute__((vector_size(Size)));
  typedef Integer Mask __attribute__((vector_size(Size)));  // all bits of an entry are set, or none
  static constexpr int lanes = Size / (int)sizeof(T);
  static constexpr T inf = std::numeric_limits<T>::infinity();

  KHOT_INLINE static Reg all(T v) { return Reg{} + v; }
  KHOT_INLINE static Reg keep(Mask where, Reg v) { return (Reg)(where & (Mask)v); }
  KHOT_INLINE static Reg choose(Mask where, Reg a, Reg b) { return (Reg)((where & (Mask)a) | (~where & (Mask)b)); }
  KHOT_INLINE static Reg minus_size(Reg v) { return (Reg)((Mask)v | std::numeric_limits<Integer>::min()); }

  // e^a for a ≤ 0, by 2^m·e^r with |r| ≤ log(2)/2 and the series of e^r; 0 where it would be denormal.
  KHOT_INLINE static Reg exp(Reg a) {
    using E = Exp<T>;
    const Mask is_normal = a > E::least;
    a = choose(is_normal, a, all(E::least));
    const Reg shifted = a * (T)1.4426950408889634 + E::round, m = shifted - E::round;
    const Reg r = (a - m * E::high) - m * E::low;
    Reg sum = all(1);
#pragma GCC unroll 16
    for (int i = E::terms; i > 0; --i) sum = sum * (r * (T)(1.0 / i)) + (T)1;  // 1 + r(1 + r/2·(1 + r/3·(…)))
    const Mask power = (Mask)shifted - (Mask)all(E::round) + E::bias;
    return keep(is_normal, sum * (Reg)(power << E::shift));
  }

  // The smaller of F and 1 − F, F′, and whether 1 − F is the smaller, at z, which may be infinite.
  struct At {
    Reg tail, density;
    Mask above;
  };
  template <int Cdf> KHOT_INLINE static At at(Reg z) {
    if constexpr (Cdf == KHOT_EUCLIDEAN) {
      const Mask above = z > (T)0.5;
      const Reg tail = choose(above, (T)1 - z, z);
      return {keep(tail > (T)0, tail), keep(tail > (T)0, all(1)), above};
    } else {
      const Reg e = exp(minus_size(z)), tail = Cdf == KHOT_LAPLACE ? e * (T)0.5 : e / (e + (T)1);
      return {tail, Cdf == KHOT_LAPLACE ? tail : tail - tail * tail, z > (T)0};
    }
  }
  KHOT_INLINE static Reg margin(const T* x, const Point<T>& at) {
    Reg v;
    std::memcpy(&v, x, sizeof v);
    return (v - at.anchor) / at.temperature - at.shift;
  }

  // The number above the median, Σ F below, Σ 1 − F above, Σ F′ below and above it.
  template <int Cdf> KHOT_INLINE static void sums(const T* x, int64_t n, const Point<T>& point, double* out) {
    for (int s = 0; s < kSums; ++s) out[s] = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = begin + kBlock < n ? begin + kBlock : n;
      Reg part[kSums] = {};
      for (int64_t i = begin; i < end; i += lanes) {
        T last[lanes];
        const T* from = x + i;
        if (end - i < lanes) from = filled(from, end - i, last);
        const At f = at<Cdf>(margin(from, point));
        part[0] += keep(f.above, all(1));
        part[1] += keep(~f.above, f.tail);
        part[2] += keep(f.above, f.tail);
        part[3] += keep(~f.above, f.density);
        part[4] += keep(f.above, f.density);
      }
      for (int s = 0; s < kSums; ++s)
        for (int j = 0; j < lanes; ++j) out[s] += (double)part[s][j];
    }
  }

  // y = F(z) + give·F′(z). An infinite threshold puts all scores on one side, but for infinite ones.
  template <int Cdf> KHOT_INLINE static void values(const T* x, int64_t n, const Point<T>& point, T give, T* y) {
    if (!(point.shift > -inf && point.shift < inf)) {
      const T other = point.shift > 0 ? 0 : point.shift < 0 ? 1 : point.shift;
      for (int64_t i = 0; i < n; ++i) y[i] = x[i] == inf && other == 0 ? 1 : x[i] == -inf && other == 1 ? 0 : other;
      return;
    }
    for (int64_t i = 0; i < n; i += lanes) {
      T last[lanes];
      const Reg z = margin(n - i < lanes ? filled(x + i, n - i, last) : x + i, point);
      const At f = at<Cdf>(z);
      Reg value = choose(f.above, (T)1 - f.tail, f.tail) + give * f.density;
      value = keep(value > (T)0, value);
      value = choose(value > (T)1, all(1), value);
      value = choose(z == z, value, z);
      if (n - i < lanes)
        std::memcpy(y + i, &value, (size_t)(n - i) * sizeof(T));
      else
        std::memcpy(y + i, &value, sizeof value);
    }
  }

  // The last few scores, filled up with −inf, which counts for nothing.
  KHOT_INLINE static const T* filled(const T* x, int64_t count, T* last) {
    for (int j = 0; j < lanes; ++j) last[j] = j < count ? x[j] : -inf;
    return last;
  }
};

template <class T> struct Loops {
  void (*sums)(const T*, int64_t, const Point<T>&, double*);
  void (*values)(const T*, int64_t, const Point<T>&, T, T*);
};

#define KHOT_LOOPS(name, target, size)                                                                       \
  template <class T, int Cdf> target void name##_sums(const T* x, int64_t n, const Point<T>& at, double* out) { \
    Vectors<T, size>::template sums<Cdf>(x, n, at, out);                                                     \
  }                                                                                                          \
  template <class T, int Cdf> target void name##_values(const T* x, int64_t n, const Point<T>& at, T give, T* y) { \
    Vectors<T, size>::template values<Cdf>(x, n, at, give, y);                                               \
  }                                                                                                          \
  template <class T> Loops<T> name(int32_t cdf) {                                                            \
    if (cdf == KHOT_SIGMOID) return {name##_sums<T, KHOT_SIGMOID>, name##_values<T, KHOT_SIGMOID>};          \
    if (cdf == KHOT_LAPLACE) return {name##_sums<T, KHOT_LAPLACE>, name##_values<T, KHOT_LAPLACE>};          \
    return {name##_sums<T, KHOT_EUCLIDEAN>, name##_values<T, KHOT_EUCLIDEAN>};                               \
  }

KHOT_LOOPS(portable, , 16)
#if defined(__x86_64__)
KHOT_LOOPS(wide, __attribute__((target("avx2"))), 32)
#endif

template <class T> Loops<T> loops(const khot_rows& rows) {
#if defined(__x86_64__)
  if (rows.path >= KHOT_AVX2 && khot_path() >= KHOT_AVX2) return wide<T>(rows.cdf);
#endif
  return portable<T>(rows.cdf);
}

// Calls body(x, point, row, threads) for each row.
template <class T, class Body>
void at_points(const khot_rows& rows, const double* anchor, const double* shift, Body body) {
  for_rows(rows.rows, rows.n, rows.threads, [&](int64_t r, int threads) {
    const double heat = rows.temperature ? rows.temperature[r * rows.temperature_stride] : rows.temperature_of_all;
    body(static_cast<const T*>(rows.x) + r * rows.n, Point<T>{(T)anchor[r], (T)heat, (T)shift[r]}, r, threads);
  });
}

template <class T> void sums_at(const khot_rows& rows, const double* anchor, const double* shift, double* out) {
  const Loops<T> table = loops<T>(rows);
  at_points<T>(rows, anchor, shift, [&](const T* x, const Point<T>& point, int64_t r, int threads) {
    double* sums = out + r * kSums;
    for (int s = 0; s < kSums; ++s) sums[s] = 0;
    for_chunks<kSums>(rows.n, threads, sums,
                      [&](int64_t begin, int64_t end, double* part) { table.sums(x + begin, end - begin, point, part); });
  });
}

template <class T>
void value_at(const khot_rows& rows, const double* anchor, const double* shift, const double* give, T* y) {
  const Loops<T> table = loops<T>(rows);
  at_points<T>(rows, anchor, shift, [&](const T* x, const Point<T>& point, int64_t r, int threads) {
    double none = 0;
    for_chunks<1>(rows.n, threads, &none, [&](int64_t begin, int64_t end, double* part) {
      table.values(x + begin, end - begin, point, (T)give[r], y + r * rows.n + begin);
      *part = 0;
    });
  });
}

}  // namespace

void khot_sums_at(const khot_rows* rows, const double* anchor, const double* shift, double* sums) noexcept {
  if (rows->dtype == KHOT_FLOAT) return sums_at<float>(*rows, anchor, shift, sums);
  sums_at<double>(*rows, anchor, shift, sums);
}

void khot_value_at(const khot_rows* rows, const double* anchor, const double* shift, const double* give,
                   void* y) noexcept {
  if (rows->dtype == KHOT_FLOAT) return value_at(*rows, anchor, shift, give, static_cast<float*>(y));
  value_at(*rows, anchor, shift, give, static_cast<double*>(y));
}
