#pragma once
#include <string>
#include <string_view>

// Private to compare_gradients: lines of ops/hilbert/modes.cpp, put into the program when it
// was built.

namespace compare {

struct SourceLine {
  int number = 0;  // from 1; 0 if no line, or more than one, has the text
  std::string text;
};
SourceLine source_line(std::string_view containing);

/// A formula of the backward pass, and the text by which its line of the hybrid is found.
struct Formula {
  const char *formula, *what, *buffer, *marker;
};
inline constexpr Formula kFormulas[] = {
    {"P = e<sup>c Q K\u1d40 \u2212 L</sup>", "the weights again, from the one number a row that was kept", "scores",
     "// P  = "},
    {"dP = dO V\u1d40", "what a change of a weight would do to the loss", "scores", "// dP = "},
    {"dS = P (dP \u2212 \u0394)", "through the softmax; \u0394 = rowsum(dO \u00b7 O), one number a row", "scores",
     "// dS = "},
    {"dQ = c dS K", "to the queries", "q", "// dQ = "},
    {"dK = c dS\u1d40 Q", "to the keys", "k", "// dK = "},
    {"dV = P\u1d40 dO", "to the values", "k", "// dV = "},
};
inline constexpr const char* kFusedMarker = "return fused_backward(dO)";

}  // namespace compare
