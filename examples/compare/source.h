#pragma once
#include "../program/report/fill.h"

// Private to compare_gradients: the steps of attention and of its gradient, with the lines of the
// library that do them, which were put into the program when it was built.

namespace compare {

/// steps.json: of each step the formula, what the tape has there ("node": the symbol of its node,
/// see symbols_of()), and where hybrid and the kernels do it, as [file of ops/hilbert/, text that
/// one line of it has].
report::Json steps();

/// {file, line: from 1, code}; null if there is no such file, or no line or more than one has the
/// text.
report::Json source_line(std::string_view file, std::string_view marker);

}  // namespace compare
