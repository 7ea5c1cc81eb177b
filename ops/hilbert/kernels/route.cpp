// How a pass runs on a CPU: decided once, here, from what it is.
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/compact.h"

namespace hilt::kernels {

Decision route(Cpu, const ForwardPass& f) {
  Decision d;
  d.lists = &compact(*f.tiling, !f.terms);
  return d;
}

Decision route(Cpu, const BackwardPass& b, bool whole) {
  Decision d;
  d.lists = &compact(*b.tiling, !b.terms);
  d.direct = whole, d.delta = !whole;
  d.every_key = d.lists->every_key;
  return d;
}

}  // namespace hilt::kernels
