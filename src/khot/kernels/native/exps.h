// Powers of two of vectors, and what is made of them.
#pragma once

#include "simd.h"

namespace {

// 2^r on |r| ≤ ½, highest power first: to 1e-7 (float, fitted for the least relative error) and 2e-16 (double, Taylor).
// `rest` is what log₂e lacks.
template <class T> struct Exp2Polynomial;
template <> struct Exp2Polynomial<float> {
  static constexpr int degree = 5;
  static constexpr float c[degree + 1] = {
      1.326472731e-3f, 9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f};
  // For r in [0, 1), as accurate.
  static constexpr float whole[degree + 1] = {
      1.867130070e-3f, 9.017030322e-3f, 5.579991310e-2f, 2.401644502e-1f, 6.931513118e-1f, 1.0f};
  static constexpr float log2e = 1.44269504f, rest = 1.92596299e-8f, magic = 12582912.0f, most = 128;
};
template <> struct Exp2Polynomial<double> {
  static constexpr int degree = 13;
  static constexpr double c[degree + 1] = {
      1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.054911620801123e-09,
      1.01780860092397e-07, 1.321548679014431e-06, 1.5252733804059841e-05, 0.0001540353039338161,
      0.0013333558146428443, 0.009618129107628477, 0.05550410866482158, 0.24022650695910072, 0.6931471805599453, 1.0};
  static constexpr double log2e = 1.4426950408889634, rest = 2.0355273740931033e-17, magic = 6755399441055744.0,
                          most = 1024;
};

// Σ c_i x^i, highest power first.
template <class V, class T, int Count> inline typename V::reg polynomial(const T (&c)[Count], typename V::reg x) {
  auto y = V::set(c[0]);
  for (int i = 1; i < Count; ++i) y = V::fma(y, x, V::set(c[i]));
  return y;
}

// y·2^n for 2^r·2^n with |r| ≤ ½ and shifted = magic + n. The polynomial by pairs: half as long to wait for as one power
// after another.
template <class V> inline typename V::reg exp2_of(typename V::reg r, typename V::reg shifted) {
  using P = Exp2Polynomial<typename V::scalar>;
  const auto square = V::mul(r, r);
  auto y = V::fma(V::set(P::c[0]), r, V::set(P::c[1]));
  for (int i = 2; i < P::degree; i += 2) y = V::fma(y, square, V::fma(V::set(P::c[i]), r, V::set(P::c[i + 1])));
  return V::scale2(y, shifted);
}

// e^{−|z|}, and exactly 0 where that would underflow.
template <class V> inline typename V::reg small_exp(typename V::reg minus_z) {
  using P = Exp2Polynomial<typename V::scalar>;
  const auto negative = V::sub(V::set(0), V::abs(minus_z)), floor = V::set(Limits<typename V::scalar>::exp_floor);
#if defined(__AVX512F__)
  if constexpr (sizeof(typename V::scalar) == 4) {
    const auto u = V::mul(negative, V::set(P::log2e)), lost = V::fma(negative, V::set(P::log2e), V::sub(V::set(0), u));
    const auto part = V::add(fraction(u), V::fma(negative, V::set(P::rest), lost));
    return V::keep(V::ge(negative, floor), scaled(polynomial<V>(P::whole, part), u));
  }
#endif
  const auto t = V::max(negative, floor), log2e = V::set(P::log2e), magic = V::set(P::magic);
  const auto shifted = V::fma(t, log2e, magic), n = V::sub(shifted, magic);
  const auto r = V::fma(t, V::set(P::rest), V::fma(t, log2e, V::sub(V::set(0), n)));
  return V::keep(V::ge(negative, floor), exp2_of<V>(r, shifted));
}

// 2^u for |u| that does not overflow, or one more, which gives infinity. For NaN it gives some number.
template <class V> inline typename V::reg power_of_two(typename V::reg u) {
  const auto magic = V::set(Exp2Polynomial<typename V::scalar>::magic), shifted = V::add(u, magic);
  return exp2_of<V>(V::sub(u, V::sub(shifted, magic)), shifted);
}

// σ(z) from −z·log₂e: NaN for NaN, and exactly 0 where e^{−z} overflows.
template <class V, class P = Exp2Polynomial<typename V::scalar>> inline typename V::reg sigma_of(typename V::reg t) {
  constexpr auto most = P::most;
#if defined(__AVX512F__)
  // It scales by any power of two, also 2^±∞; of doubles −∞, a score of +∞, must be kept from becoming NaN.
  if constexpr (sizeof(most) == 4) {
    return V::div(V::set(1), V::add(V::set(1), scaled(polynomial<V>(P::whole, fraction(t)), t)));
  } else {
    const auto u = V::max(t, V::set(2 - 2 * most)), n = nearest(u);
    return inverse_below(t, most, V::add(V::set(1), scaled(polynomial<V>(P::c, V::sub(u, n)), n)));
  }
#else
  const auto u = V::max(V::min(t, V::set(most)), V::set(2 - most));
  const auto one = V::fma(u, V::set(0), V::set(1));  // NaN for NaN
  return V::div(one, V::add(V::set(1), power_of_two<V>(u)));
#endif
}

// min(σ(z), σ(−z)), to all digits however small.
template <class V> inline typename V::reg tail_of(typename V::reg minus_z) {
  const auto e = small_exp<V>(minus_z);
  return V::div(e, V::add(V::set(1), e));
}

// σ(logit p + step) for grow = e^step − 1.
template <class V> inline typename V::reg shifted(typename V::reg p, typename V::reg grow) {
  const auto t = V::mul(p, grow);
#if defined(__AVX512F__)
  if constexpr (sizeof(typename V::scalar) == 4) {  // a division takes longer than the rest of a pass
    const auto d = V::add(V::set(1), t), rough = rough_inverse(d);
    const auto inverse = V::fma(rough, V::fnma(d, rough, V::set(1)), rough);
    return V::fma(V::fnma(t, p, t), inverse, p);  // of 1 it makes 1
  }
#endif
  return V::div(V::add(p, t), V::add(V::set(1), t));
}

}  // namespace
