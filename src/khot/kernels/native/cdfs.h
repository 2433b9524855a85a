// The cdfs that have a kernel, as far as a threshold needs them.
#pragma once

#include "row.h"

namespace {

template <class V> struct At {
  typename V::reg tail, density;  // the smaller of F and 1 − F, and F′
  typename V::mask_t above;       // whether 1 − F is the smaller
};

// A cdf without a parameter.
template <class Cdf> struct Fixed {
  static constexpr bool has_moves = false;
  template <class T> static Cdf of(const Row<T>&) { return {}; }
};

// What scores within e^−certain of nothing have in common: the logistic and the Laplace cdf.
struct Exponential {
  static constexpr bool is_smooth = true;
  // τ lies within so many T of the two order statistics around k; `crowd` is n over the distance of k from the next
  // whole numbers.
  template <class V> static typename V::reg reach(typename V::reg crowd) { return V::add(V::log(crowd), V::set(1)); }
  // Beyond reach by so many T a tail of a T is below rounding, even n of them.
  template <class T, class V> static typename V::reg certain(typename V::reg n) {
    return V::add(V::log(n), V::set(sizeof(T) == 4 ? 20 : 42));
  }
};

struct Logistic : Exponential, Fixed<Logistic> {
  static constexpr bool is_logistic = true;
  static constexpr float width = 1;  // of the logistic cdf that is most like it
  template <class V> static At<V> at(typename V::reg minus_z) {
    const auto tail = tail_of<V>(minus_z);
    return {tail, V::fnma(tail, tail, tail), V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) { return V::mul(y, V::sub(V::set(1), y)); }
};

struct Laplace : Exponential, Fixed<Laplace> {
  static constexpr bool is_logistic = false, has_simple_slope = true, has_moves = true;
  static constexpr float width = 0.8f;
  template <class V> static At<V> at(typename V::reg minus_z) {
    const auto tail = V::mul(V::set(0.5f), small_exp<V>(minus_z));
    return {tail, tail, V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) {
    const auto rest = V::sub(V::set(1), y);
    return V::blend(V::gt(y, rest), rest, y);
  }
  // F(z + step) from y = F(z), for a short step: to 3e-8.
  static constexpr double most_step = 1.0 / 32;
  template <class V> static typename V::reg moved(typename V::reg y, typename V::scalar grow, typename V::scalar fall) {
    const auto one = V::set(1), rest = V::sub(one, y);
    const auto is_upper = V::gt(y, rest);
    const auto t = V::blend(is_upper, V::mul(rest, V::set(fall)), V::mul(y, V::set(grow)));
    // A tail beyond ½, (1 + e)/2, has crossed the middle: it is 1 − 1/(4t) = t − e²/2(1 − e + e² − …).
    const auto e = V::max(V::sub(V::add(t, t), one), V::set(0)), series = V::fma(e, e, V::sub(one, e));
    const auto tail = V::fnma(V::mul(V::mul(V::set(0.5f), e), e), series, t);
    return V::blend(is_upper, V::sub(one, tail), tail);
  }
};

struct Euclidean : Fixed<Euclidean> {
  static constexpr bool is_logistic = false, has_simple_slope = true, is_smooth = false;
  static constexpr float width = 0.25f;
  template <class V> static typename V::reg reach(typename V::reg) { return V::set(1); }
  template <class T, class V> static typename V::reg certain(typename V::reg) { return V::set(1); }
  template <class V> static At<V> at(typename V::reg minus_z) {
    const auto z = V::sub(V::set(0), minus_z), zero = V::set(0), one = V::set(1);
    const auto inside = V::both(V::gt(z, zero), V::gt(one, z));
    const auto above = V::gt(z, V::set(0.5f));
    const auto tail = V::blend(above, V::sub(one, z), z);
    return {V::keep(inside, tail), V::keep(inside, one), above};
  }
  template <class V> static typename V::reg slope(typename V::reg y) {
    const auto inside = V::both(V::gt(y, V::set(0)), V::gt(V::set(1), y));
    const auto none = V::mul(y, V::set(0));  // NaN for NaN
    return V::add(none, V::keep(inside, V::set(1)));
  }
};

// The normal and the Cauchy cdf, and powers, have kernels for floats alone: the fits below are good to 3e-7, the slope of Φ to 2e-6.
struct Normal : Fixed<Normal> {
  static constexpr bool is_logistic = false, has_simple_slope = false, is_smooth = true;
  static constexpr float width = 0.627f;
  template <class V> static typename V::reg reach(typename V::reg crowd) {
    const auto log = V::log(crowd);
    return V::add(V::sqrt(V::add(log, log)), V::set(1));
  }
  template <class T, class V> static typename V::reg certain(typename V::reg n) { return V::sqrt(2 * V::log(n) + 40); }
  template <class V> static At<V> at(typename V::reg minus_z) {
    // Φ(−t) = e^{−t²/2}·s·P(s) with s = 1/(1 + 0.35t)
    constexpr float c[] = {-0.0291454181f, 0.143969441f, -0.255710065f, 0.159169894f, -0.0231072387f,
                           0.105507041f,   0.119833079f, 0.139861845f,  0.139621406f};
    const auto t = V::abs(minus_z), s = V::div(V::set(1), V::fma(t, V::set(0.35f), V::set(1)));
    const auto e = small_exp<V>(V::mul(V::mul(t, V::set(0.5f)), t));
    return {V::mul(V::mul(e, s), polynomial<V>(c, s)), V::mul(e, V::set(0.398942280f)), V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) {
    // φ(Φ⁻¹(m)) = m·w·P(1/w) with w = √(−2 log m), for m ≤ ½
    constexpr float c[] = {3.18865307f,  -14.967077f, 30.9292528f,  -37.4042678f,   29.9240321f,
                           -17.1653487f, 7.43639773f, -2.23715177f, -0.0699709686f, 1.00099194f};
    const auto rest = V::sub(V::set(1), y), m = V::min(rest, y);
    const auto w = V::sqrt(V::mul(V::set(-2), V::log(V::max(m, V::set(Limits<float>::tiny)))));
    const auto slope = V::mul(V::mul(m, w), polynomial<V>(c, V::div(V::set(1), w)));
    return V::blend(V::ge(V::set(Limits<float>::tiny), m), V::mul(m, V::set(0)), slope);
  }
};

struct Cauchy : Fixed<Cauchy> {
  static constexpr bool is_logistic = false, has_simple_slope = true, is_smooth = true;
  static constexpr float width = 1;
  template <class V> static typename V::reg reach(typename V::reg crowd) {
    return V::add(V::min(crowd, V::set(1e30f)), V::set(1));
  }
  template <class T, class V> static typename V::reg certain(typename V::reg) { return V::set(1e30f); }  // never
  template <class V> static At<V> at(typename V::reg minus_z) {
    // atan(u)/π = u·P(u²) for u ≤ 1
    constexpr float c[] = {-0.00149384892f, 0.0077195638f, -0.018934837f, 0.0315580085f,
                           -0.0446253423f,  0.063565598f,  -0.106099021f, 0.318309855f};
    const auto one = V::set(1), t = V::abs(minus_z);
    const auto is_far = V::gt(t, one);
    const auto u = V::blend(is_far, V::div(one, t), t), angle = V::mul(u, polynomial<V>(c, V::mul(u, u)));
    const auto tail = V::blend(is_far, angle, V::sub(V::set(0.5f), angle));
    return {tail, V::div(V::set(0.318309886f), V::fma(t, t, one)), V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) {
    // sin(πm)/√π = m·P(m²) for m ≤ ½
    constexpr float c[] = {0.043758637f, -0.337521921f, 1.43872277f, -2.91556797f, 1.77245384f};
    const auto m = V::min(V::sub(V::set(1), y), y), sine = V::mul(m, polynomial<V>(c, V::mul(m, m)));
    return V::mul(sine, sine);
  }
};

// clip(z, 0, 1)^a for 1 ≤ a ≤ 4: to 3e-7. For floats alone, as it takes the logarithm of z.
struct Power {
  static constexpr bool is_logistic = false, has_moves = false, has_simple_slope = false, is_smooth = false;
  static constexpr float width = 0.25f;
  float exponent, median;
  int whole;  // the exponent if it is an integer, as it is for p = 4/3 and 3/2; else 0
  template <class T> static Power of(const Row<T>& row) {
    const auto a = (float)row.exponent;
    return {a, (float)std::pow(0.5, 1 / row.exponent), a == std::floor(a) ? (int)a : 0};
  }
  template <class V> static typename V::reg reach(typename V::reg) { return V::set(1); }
  template <class T, class V> static typename V::reg certain(typename V::reg) { return V::set(1); }
  template <class V> At<V> at(typename V::reg minus_z) const {
    const auto z = V::sub(V::set(0), minus_z), one = V::set(1), tiny = V::set(Limits<float>::tiny);
    const auto inside = V::both(V::gt(z, V::set(0)), V::gt(one, z));
    const auto safe = V::max(V::min(z, one), tiny), a = V::set(exponent);
    auto y = safe, slope = one;  // z^a and z^{a − 1}
    if (whole) {
      for (int i = 1; i < whole; ++i) slope = y, y = V::mul(y, safe);
    } else {
      y = small_exp<V>(V::mul(a, V::log(safe)));
      slope = V::div(y, safe);
    }
    const auto above = V::gt(z, V::set(median));
    return {V::keep(inside, V::blend(above, V::sub(one, y), y)), V::keep(inside, V::mul(a, slope)), above};
  }
  // F′ = a·y^{1 − 1/a}
  template <class V> typename V::reg slope(typename V::reg y) const {
    const auto inside = V::both(V::gt(y, V::set(0)), V::gt(V::set(1), y));
    const auto log = V::log(V::max(V::min(y, V::set(1)), V::set(Limits<float>::tiny)));
    const auto v = V::mul(V::set(exponent), small_exp<V>(V::mul(V::set(1 - 1 / exponent), log)));
    return V::add(V::mul(y, V::set(0)), V::keep(inside, v));  // NaN for NaN
  }
};

}  // namespace
