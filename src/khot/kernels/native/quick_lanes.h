// The quick way of quick.h for eight short rows at once. Rows that it does not settle are left to the sure way.
#pragma once

#include "lanes.h"
#include "quick.h"

#ifdef KHOT_AVX2
namespace {

// Number, mean and variance of the finite scores of each row, block by block.
struct Description {
  __m256 origin, number = Avx2Float::set(0), sum = Avx2Float::set(0), squares = Avx2Float::set(0);
  explicit Description(const Row<float>* rows) {
    alignas(32) float first[8];
    for (int r = 0; r < 8; ++r) {
      const bool is_finite = allowed(rows[r], 0) && std::fabs(rows[r].x[0]) <= Limits<float>::largest;
      first[r] = is_finite ? rows[r].x[0] : 0;
    }
    origin = Avx2Float::load(first);
  }
  void add(const __m256* block) {
    using V = Avx2Float;
    for (int i = 0; i < 8; ++i) {
      const auto finite = V::ge(V::set(Limits<float>::largest), V::abs(block[i]));
      const auto d = V::keep(finite, V::sub(block[i], origin));
      number = V::add(number, V::keep(finite, V::set(1)));
      sum = V::add(sum, d);
      squares = V::fma(d, d, squares);
    }
  }
  __m256 guess(__m256 k, __m256 temperature) const {
    using V = Avx2Float;
    const auto drift = V::div(sum, number), mean = V::add(origin, drift);
    const auto variance = V::max(V::fnma(drift, drift, V::div(squares, number)), V::set(0));
    return normal_guess<V>(number, mean, variance, k, temperature);
  }
};

// The smaller of k and what it leaves, which is summed: numbers near 1 would round the sum's digits away.
struct Smaller {
  __m256 is_rest, k, n;  // whether 1 − p is summed, the sum, and how many are summed
  double k64[8];
  Smaller(const Columns& rows, __m256 count)
      : is_rest(Avx2Float::gt(Avx2Float::add(rows.k, rows.k), count)), k(rows.k), n(count) {
    std::memcpy(k64, rows.k64, sizeof k64);
    const unsigned rest = Avx2Float::lanes(is_rest);
    if (!rest) return;
    alignas(32) float rounded[8];
    for (int r = 0; r < 8; ++r) {
      if (rest >> r & 1) k64[r] = (double)rows.padded - k64[r];
      rounded[r] = (float)k64[r];
    }
    k = Avx2Float::load(rounded);
    n = Avx2Float::blend(is_rest, Avx2Float::set((float)rows.padded), count);
  }
};

// Solves eight rows; p is written for those whose bit is NOT set in the result.
inline unsigned quick_eight(const Row<float>* given, float* const* out) {
  using V = Avx2Float;
  Description about(given);
  const Columns rows(given, [&](const __m256* block) { about.add(block); });
  const Smaller small(rows, about.number);
  const auto *x = rows.x, one = V::set(1), k = small.k;
  // The sign of T makes it σ(−z).
  const auto temperature = V::blend(small.is_rest, V::sub(V::set(0), rows.temperature), rows.temperature);
  const auto scale = V::div(one, temperature);
  auto anchor = about.guess(rows.k, rows.temperature), shift = V::set(0);
  __m256 p[khot::kShort];

  auto step = V::set(0), variability = V::set(0), bend = V::set(0);
  for (int pass = 0; pass < 3; ++pass) {
    __m256 sum[2] = {V::set(0), V::set(0)}, v1 = V::set(0), pv = V::set(0), vv = V::set(0);
    for (int64_t j = 0; j < rows.padded; ++j) {
      p[j] = sigma_of<V>(V::fma(V::sub(anchor, x[j]), scale, shift));
      const auto v = V::fnma(p[j], p[j], p[j]);
      sum[j & 1] = V::add(sum[j & 1], p[j]);
      v1 = V::add(v1, v);
      pv = V::fma(p[j], v, pv);
      vv = V::fma(v, v, vv);
    }
    step = third_order_step<V>(V::add(sum[0], sum[1]), v1, pv, vv, small.n, k);
    variability = v1;
    bend = V::fnma(V::set(2), pv, v1);
    if (V::lanes(V::ge(V::abs(step), V::set(kLongStep))) == 0) break;  // NaN counts as small: its row fails below
    const auto moved = V::fnma(step, temperature, anchor);
    shift = V::mul(V::add(V::sub(V::sub(anchor, moved), V::mul(step, temperature)), V::mul(shift, temperature)), scale);
    anchor = moved;
  }
  // A long step cannot be a polish.
  auto is_near = V::gt(V::set(kLongStep), V::abs(step)), settled = is_near;
  for (int polish = 0; polish < 2; ++polish) {
    const auto grow = V::sub(exp_of<V>(V::max(V::min(step, one), V::set(-1))), one);
    Total sum;
    for (int64_t j = 0; j < rows.padded; ++j) {
      p[j] = shifted<V>(p[j], grow);
      sum.add(p[j]);
    }
    const auto excess = sum.less(small.k64);
    variability = V::fma(step, bend, variability);
    const auto limit = V::mul(V::set(4 * Limits<float>::eps), variability);
    const auto noise = V::mul(V::set(2 * Limits<float>::eps), V::sqrt(V::mul(k, V::min(k, one))));
    const auto is_clear = V::ge(V::mul(V::set(4), limit), noise);
    settled = V::both(V::both(is_near, is_clear), V::ge(V::max(limit, noise), V::abs(excess)));
    step = V::sub(V::set(0), V::div(excess, variability));
    is_near = V::both(is_near, V::gt(V::set(kLongStep), V::abs(step)));
    if ((V::lanes(settled) | (~V::lanes(is_near) & 0xffu)) == 0xff) break;  // nothing is left to polish
  }
  const unsigned solved = V::lanes(settled);
  if (solved & V::lanes(small.is_rest))
    for (int64_t j = 0; j < rows.padded; ++j) p[j] = V::blend(small.is_rest, V::sub(one, p[j]), p[j]);
  rows.store(solved, p, out);
  return ~solved & 0xffu;
}

}  // namespace
#endif
