// Where a threshold is, and the margins of scores around it.
#pragma once

#include "row.h"

namespace {

// τ = anchor + T·shift: the anchor is a score-sized number near τ, the shift the rest in units of T.
template <class T> struct Point {
  T anchor;
  double shift;

  static Point at(double anchor, double shift, double temperature) {
    const double tau = anchor + temperature * shift;
    double near = (double)(T)tau;
    if (!(std::fabs(near) <= (double)Limits<T>::largest)) near = anchor;
    return {(T)near, shift - (near - anchor) / temperature};
  }
  Point moved(double step, double temperature) const { return at((double)anchor, shift + step, temperature); }
};

// −z = (anchor − x)/T + shift. Bodies capture it, and all else, by value: what they store might alias a reference.
template <class T> struct Margin {
  T anchor, scale, shift;
  Margin(T anchor, T scale, T shift) : anchor(anchor), scale(scale), shift(shift) {}
  // In units of `unit` temperatures.
  Margin(const Point<T>& point, double temperature, double unit = 1)
      : anchor(point.anchor), scale((T)(1.0 / (unit * temperature))), shift((T)(point.shift / unit)) {}
  template <class V> typename V::reg minus_z(typename V::reg x) const {
    return V::fma(V::sub(V::set(anchor), x), V::set(scale), V::set(shift));
  }
  void flip() { scale = -scale, shift = -shift; }  // z instead of −z
};

}  // namespace
