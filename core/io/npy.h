#pragma once
#include <vector>
#include "../dtype.h"
#include "../shape.h"

namespace [[gnu::visibility("default")]] hilt {

class Tensor;

/// The tensor in a NumPy file of f8 f4 f2 i8 i4 u1, little endian; Fortran order comes back as
/// strides. Nothing in the file is trusted or runs. Errors (Code::data) name file and byte.
Tensor read_npy(const std::string& path);

struct NpyIntegers {  // the same without tensors: the elements in C order; none if they are not integers
  DType dtype{};
  Shape shape{};
  std::vector<std::int64_t> values{};  // in C order, widened
};
NpyIntegers read_npy_integers(const std::string& path);  // throws Code::data as read_npy()

/// Writes x in C order. The file appears whole or not at all: what was there stays until then.
void write_npy(const std::string& path, const Tensor& x);

}  // namespace hilt
