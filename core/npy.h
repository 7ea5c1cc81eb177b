#pragma once
#include <string>
#include "tensor.h"

namespace [[gnu::visibility("default")]] hilt {

/// A tensor from a .npy file: f8 f4 f2 i8 i4 u1, either byte order of axes (Fortran order comes back as strides), little endian.
/// Trusts nothing in the file: every number is checked before it is used, and errors (Code::data) name file and byte.
Tensor read_npy(const std::string& path);

/// Writes version 1.0, C order, little endian. Either the whole file appears under its name or nothing does.
void write_npy(const std::string& path, const Tensor& x);

}  // namespace hilt
