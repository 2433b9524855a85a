// The gradient of a row from v = F′ and the cotangent g of y: v(g − ḡ)/T with ḡ = Σvg/Σv.
//
// An entry with v = 0 counts as deleted: its g, NaN or infinite, must not reach the others. Such a g makes Σvg NaN, so a
// row is summed first as if there were none, and again with care if that sum is not finite.
#pragma once

#include "row.h"

namespace {

// g, and 0 where v is, if `Careful`.
template <bool Careful, class V> inline typename V::reg live(typename V::reg v, typename V::reg g) {
  if constexpr (Careful) return V::keep(v != V::set(0), g);
  return g;
}

// `Unit`: T is 1.
template <class T, bool Careful, bool Unit = false> struct Centered {
  T center, scale;
  Centered(double mean, double temperature) : center((T)mean), scale(Unit ? 1 : (T)(1.0 / temperature)) {}
  template <class V> typename V::reg of(typename V::reg v, typename V::reg g) const {
    const auto scaled = Unit ? v : V::mul(v, V::set(scale));
    return live<Careful, V>(v, V::mul(scaled, V::sub(g, V::set(center))));
  }
};

}  // namespace
