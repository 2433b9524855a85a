// The cdfs that have a kernel, as far as a threshold needs them.
#pragma once

#include "simd.h"

namespace {

template <class V> struct At {
  typename V::reg tail, density;  // the smaller of F and 1 − F, and F′
  typename V::mask_t above;       // whether 1 − F is the smaller
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

struct Logistic : Exponential {
  static constexpr bool is_logistic = true;
  template <class V> static At<V> at(typename V::reg minus_z) {
    const auto tail = tail_of<V>(minus_z);
    return {tail, V::fnma(tail, tail, tail), V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) { return V::mul(y, V::sub(V::set(1), y)); }
};

struct Laplace : Exponential {
  static constexpr bool is_logistic = false;
  template <class V> static At<V> at(typename V::reg minus_z) {
    const auto tail = V::mul(V::set(0.5f), small_exp<V>(minus_z));
    return {tail, tail, V::gt(V::set(0), minus_z)};
  }
  template <class V> static typename V::reg slope(typename V::reg y) {
    const auto rest = V::sub(V::set(1), y);
    return V::blend(V::gt(y, rest), rest, y);
  }
};

struct Euclidean {
  static constexpr bool is_logistic = false, is_smooth = false;
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

}  // namespace
