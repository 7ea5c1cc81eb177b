#pragma once
#include "../program/report/fill.h"

// Private to compare_gradients: the steps of attention and of its gradient, with the lines of the
// library that do them, which were put into the program when it was built.

namespace compare {

/// steps.json: of each step the formula, what the tape has there ("node": the symbol of its node,
/// see symbols_of()), and where hybrid and the kernels do it, as [file of ops/hilbert/, text that
/// one line of it has, and, where that is not the line, text of the first line after it that is].
report::Json steps();

/// {file, line: from 1, code} of such a place; null if there is no such file, or no line or more
/// than one has the text.
report::Json source_line(const report::Json& place);

}  // namespace compare
