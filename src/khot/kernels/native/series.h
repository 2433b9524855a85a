// Functions of a probability that all items of a row have in common, as series.
#pragma once

#include "row.h"

namespace {

constexpr int kTerms = 32;  // of a series

// A function of p in [0, 1] as a series of Chebyshev polynomials, if `kTerms` suffice for it.
template <class V> struct Series {
  using reg = typename V::reg;
  double x[kTerms], value[kTerms], terms[kTerms];  // value[m] is to be set to that at p = (1 + x[m])/2
  int count;

  Series() {
    for (int m = 0; m < kTerms; ++m) {
      x[m] = std::cos(3.141592653589793 * (m + 0.5) / kTerms);
      value[m] = 0;
    }
  }

  bool fits() {
    double last[kTerms], now[kTerms], least = std::fabs(value[0]);
    for (int m = 0; m < kTerms; ++m) {
      least = std::fabs(value[m]) < least ? std::fabs(value[m]) : least;
      last[m] = x[m];
      now[m] = 1;
    }
    for (int r = 0; r < kTerms; ++r) {
      double sum = 0;
      for (int m = 0; m < kTerms; ++m) {
        sum += value[m] * now[m];
        const double next = 2 * x[m] * now[m] - last[m];
        last[m] = now[m];
        now[m] = next;
      }
      terms[r] = sum * (r ? 2.0 : 1.0) / kTerms;
    }
    for (count = kTerms; count > 1 && std::fabs(terms[count - 1]) <= 4e-16 * least;) --count;
    return count < kTerms - 2;
  }

  reg at(reg x) const {
    const reg twice = V::add(x, x);
    reg b = V::set(0), before = V::set(0);
    for (int r = count - 1; r > 0; --r) {
      const reg next = V::sub(V::fma(twice, b, V::set(terms[r])), before);
      before = b;
      b = next;
    }
    return V::sub(V::fma(x, b, V::set(terms[0])), before);
  }
};

}  // namespace
