#pragma once
#include <functional>
#include <span>

// The names of core alone, for headers that pass them on: hilt.h takes longer to compile.

namespace [[gnu::visibility("default")]] hilt {

enum class Code : int;
enum class DType : unsigned char;
struct Device;
class Error;
class Shape;
class Storage;
class Tensor;
class Function;
class Gradients;
class Tape;
class Generator;
struct RandomKey;
/// A piece of a model: any number of ops, from inputs to one output.
using Composite = std::function<Tensor(std::span<const Tensor>)>;

}  // namespace hilt
