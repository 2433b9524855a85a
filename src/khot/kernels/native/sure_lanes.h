// The sure way of sure.h for eight short rows of σ_k at once. No step depends on the other rows, so neither does a
// result.
#pragma once

#include "lanes.h"
#include "sure.h"

#ifdef KHOT_AVX2
namespace {

// Numbers whose order as signed integers is that of the scores, and back. No NaN.
inline __m256i column_key(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  return _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
}
inline __m256 column_of(__m256i key) {
  return _mm256_castsi256_ps(_mm256_xor_si256(key, _mm256_srli_epi32(_mm256_srai_epi32(key, 31), 1)));
}

// The scores of rank r = ⌈k⌉ and ⌊k⌋ + 1 (1 = largest) of each row, by halving the keys between two that occur. Rows
// that are not `wanted` may get any number.
inline void select_columns(const Columns& rows, unsigned wanted, __m256* upper, __m256* lower) {
  using V = Avx2Float;
  alignas(32) int32_t ranks[8], is_integer[8];
  for (int r = 0; r < 8; ++r) {
    const double up = wanted >> r & 1 ? std::ceil(rows.k64[r]) : 0;
    ranks[r] = (int32_t)up;
    is_integer[r] = up == rows.k64[r] ? -1 : 0;
  }
  const auto load = [](const int32_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); };
  const auto set_bits = [](__m256i of) { return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(of)); };
  const __m256i rank = load(ranks), one = _mm256_set1_epi32(1), all_bits = _mm256_set1_epi32(-1);
  __m256i keys[khot::kShort], low, high;  // the key of rank r is one of [low, high]
  low = high = column_key(rows.x[0]);
  for (int64_t j = 0; j < rows.padded; ++j) {
    keys[j] = column_key(rows.x[j]);
    low = _mm256_min_epi32(low, keys[j]);
    high = _mm256_max_epi32(high, keys[j]);
  }
  __m256i reached = _mm256_set1_epi32((int32_t)rows.padded),
          before = low;  // how many reach `low`, and the next smaller key
  for (;;) {
    const __m256i is_done = _mm256_or_si256(_mm256_cmpeq_epi32(low, high), _mm256_cmpeq_epi32(reached, rank));
    if ((set_bits(is_done) & wanted) == wanted) break;
    // A pivot in (low, high]; differences are unsigned, and those on the wrong side are the largest.
    const __m256i half = _mm256_srli_epi32(_mm256_sub_epi32(high, low), 1);
    const __m256i beneath = _mm256_add_epi32(low, half), pivot = _mm256_add_epi32(beneath, one);
    __m256i count = _mm256_setzero_si256(), up = all_bits, down = all_bits;
    for (int64_t j = 0; j < rows.padded; ++j) {
      count = _mm256_sub_epi32(count, _mm256_cmpgt_epi32(keys[j], beneath));
      up = _mm256_min_epu32(up, _mm256_sub_epi32(keys[j], pivot));
      down = _mm256_min_epu32(down, _mm256_sub_epi32(beneath, keys[j]));
    }
    const __m256i is_high = _mm256_cmpgt_epi32(rank, count);  // too few reach the pivot
    const __m256i falls = _mm256_andnot_si256(is_done, is_high),
                  rises = _mm256_andnot_si256(_mm256_or_si256(is_done, is_high), all_bits);
    const __m256i smaller = _mm256_sub_epi32(beneath, down);
    high = _mm256_blendv_epi8(high, smaller, falls);
    before = _mm256_blendv_epi8(before, smaller, rises);
    low = _mm256_blendv_epi8(low, _mm256_add_epi32(pivot, up), rises);
    reached = _mm256_blendv_epi8(reached, count, rises);
  }
  const __m256i has_next = _mm256_and_si256(load(is_integer), _mm256_cmpeq_epi32(reached, rank));
  *upper = column_of(low);
  *lower = V::blend(_mm256_castsi256_ps(has_next), column_of(before), *upper);
}

struct ColumnTails {
  __m256 lower, upper, lower_v, upper_v;  // as in Tails
  __m256 excess, difference;              // N − k, and left − right, rounded once
};

// Also stores in `signed_tails` the smaller of p and 1 − p, negative if it is 1 − p.
inline ColumnTails tails(const Columns& rows, __m256 anchor, __m256 scale, __m256 shift, __m256* signed_tails) {
  using V = Avx2Float;
  const auto minus_zero = V::set(-0.0f);
  Total lower, upper, above;
  __m256 lower_v = V::set(0), upper_v = V::set(0);
  for (int64_t j = 0; j < rows.padded; j += 8) {
    __m256 all = V::set(0), high = V::set(0), number = V::set(0);
    for (int64_t i = j; i < j + 8; ++i) {
      const auto at = Logistic::at<V>(V::fma(V::sub(anchor, rows.x[i]), scale, shift));
      signed_tails[i] = _mm256_or_ps(at.tail, V::keep(at.above, minus_zero));
      const auto tail = V::keep(at.above, at.tail), density = V::keep(at.above, at.density);
      high = V::add(high, tail);
      all = V::add(all, V::sub(at.tail, tail));
      upper_v = V::add(upper_v, density);
      lower_v = V::add(lower_v, V::sub(at.density, density));
      number = V::add(number, V::keep(at.above, V::set(1)));
    }
    lower.add(all);
    upper.add(high);
    above.add(number);
  }
  const Total difference = lower.minus(upper).plus(above);
  return {lower.rounded(), upper.rounded(), lower_v, upper_v, above.less(rows.k64), difference.less(rows.k64)};
}

constexpr int kMostSteps = 40;

// Solves eight rows; p is written for those whose bit is NOT set in the result.
inline unsigned sure_eight(const Row<float>* given, float* const* out) {
  using V = Avx2Float;
  const auto largest = V::set(Limits<float>::largest), zero = V::set(0), one = V::set(1), half = V::set(0.5f);
  __m256 finite = zero, infinite = zero, numbers = zero;
  const Columns rows(given, [&](const __m256* block) {
    for (int i = 0; i < 8; ++i) {
      finite = V::add(finite, V::keep(V::ge(largest, V::abs(block[i])), one));
      infinite = V::add(infinite, V::keep(V::gt(block[i], largest), one));
      numbers = V::add(numbers, V::keep(V::ge(block[i], block[i]), one));
    }
  });
  // A finite threshold, no NaN, and a temperature whose inverse is a number.
  const auto rest = V::sub(rows.k, infinite), temperature = rows.temperature, scale = V::div(one, temperature);
  const auto has_root = V::both(V::gt(rest, zero), V::gt(finite, rest));
  const auto is_usual = V::both(V::gt(temperature, V::set(1e-30f)), V::gt(V::set(1e30f), temperature));
  const auto usable = V::both(V::both(has_root, is_usual), V::ge(numbers, V::set((float)rows.padded)));
  if (!V::lanes(usable)) return 0xff;

  alignas(32) float shares[8];
  for (int r = 0; r < 8; ++r) {
    const double part = rows.k64[r] - std::floor(rows.k64[r]);
    shares[r] = (float)(part == 0 ? 1 : part < 0.5 ? part : 1 - part);
  }
  const auto reach = Logistic::reach<V>(V::div(finite, V::load(shares)));
  const auto certain = Logistic::certain<float, V>(finite);
  __m256 upper, lower;
  select_columns(rows, V::lanes(usable), &upper, &lower);
  const auto gap = V::mul(V::sub(upper, lower), scale), middle = V::fma(half, upper, V::mul(half, lower));
  const auto is_wide = V::gt(gap, V::mul(V::set(2), V::add(reach, certain)));

  // Half way between scores next to each other there is no number: what its rounding leaves, as far as it matters.
  const auto twice = V::add(V::sub(upper, middle), V::sub(lower, middle)), most = V::set(1e4f);
  const auto off_middle = V::max(V::min(V::mul(V::mul(half, twice), scale), most), V::sub(zero, most));

  // Newton's method as in `balance`, each row for itself; τ = upper + T·shift.
  const float eps = Limits<float>::eps;
  const auto tolerance = V::set(std::sqrt(eps) / 10),
             rounding =
                 V::max(V::mul(V::set(eps / 8), V::min(rows.k, one)), V::set(Limits<float>::tiny * (float)rows.padded));
  auto low = V::sub(zero, V::add(gap, reach)), high = reach, last = V::sub(high, low);
  auto shift = V::blend(is_wide, zero, V::mul(half, V::add(low, high))), step = zero;
  auto active = usable;
  __m256 y[khot::kShort];
  for (int i = 0; i < kMostSteps && V::lanes(active); ++i) {
    const auto anchor = V::blend(is_wide, middle, V::fma(temperature, shift, upper));
    const auto left_over = V::blend(is_wide, off_middle, V::fnma(V::sub(anchor, upper), scale, shift));
    const ColumnTails t = tails(rows, anchor, scale, left_over, y);
    const auto left = V::add(t.lower, V::max(t.excess, zero));
    const auto right = V::add(t.upper, V::max(V::sub(zero, t.excess), zero));
    const auto relative = V::div(t.difference, right);  // left/right − 1
    const auto quotient = V::min(V::max(V::div(left, right), V::set(1e-30f)), V::set(1e30f));
    const auto is_close = V::gt(V::set(1e-3f), V::abs(relative));
    const auto ratio = V::blend(is_close, V::fnma(V::mul(half, relative), relative, relative), V::log(quotient));
    const auto newton = V::div(ratio, V::add(V::div(t.lower_v, left), V::div(t.upper_v, right)));
    const auto is_root = V::ge(tolerance, V::abs(ratio)), is_equal = V::ge(rounding, V::abs(t.difference));
    step = V::blend(V::both(active, _mm256_andnot_ps(is_wide, is_root)), newton, step);
    active = _mm256_andnot_ps(_mm256_or_ps(is_wide, _mm256_or_ps(is_root, is_equal)), active);
    const auto is_low = V::gt(ratio, zero);  // τ must rise
    low = V::blend(is_low, shift, low);
    high = V::blend(is_low, high, shift);
    auto next = V::add(shift, newton);
    const auto is_inside = V::both(V::gt(next, low), V::gt(high, next));
    const auto is_short = V::ge(V::mul(half, last), V::abs(newton));
    next = V::blend(V::both(is_inside, is_short), next, V::mul(half, V::add(low, high)));
    last = V::abs(V::sub(next, shift));
    shift = V::blend(active, next, shift);
  }
  for (int64_t j = 0; j < rows.padded; ++j) {
    const auto tail = V::abs(y[j]), p = V::blend(y[j], V::sub(one, tail), tail);  // the sign says which
    const auto moved = V::fnma(V::fnma(tail, tail, tail), step, p);
    y[j] = V::max(V::min(moved, one), zero);
  }
  const unsigned solved = V::lanes(usable) & ~V::lanes(active);
  rows.store(solved, y, out);
  return ~solved & 0xffu;
}

}  // namespace
#endif
