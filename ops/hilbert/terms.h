#pragma once
#include "../../core/tensor.h"

// Terms of the scores: S(t, u) = cap(c q_t . k_u) - m dist(t, u) + R[t - u] + bias(t, u), and a
// sink beside them. ops/hilbert/modes/README.md gives each term's gradient.

namespace [[gnu::visibility("default")]] hilt {

/// What is done to the scores of one call; a tensor that is not there is no term. Slopes, tables
/// and sinks are f32 (f64 with f64), a bias that or of q's type; a tape may watch each of them.
struct ScoreTerms {
  /// cap(z) = x tanh(z / x), before all else. Above 0.
  std::optional<double> softcap{};
  /// - slopes[h] dist(t, u): |t - u|, or where the pattern is one of a grid, the sum of the
  /// coordinates' distances. Without slopes [H], the published ones.
  bool alibi = false;
  Tensor slopes{};  // [H]
  /// [H, 2 r + 1] of t - u; [H, 2 ry + 1, 2 rx + 1] and [H, 2 rt + 1, 2 ry + 1, 2 rx + 1] of the
  /// coordinates on the order's grid. Query minus key, index 0 is -r; beyond r counts as r.
  Tensor relative{};
  /// i32 [L, axes], or [B, L, axes] or [B L, axes]: where each token is, which the table looks at
  /// instead. Not beside a prefix, or over ranks.
  Tensor points{};
  /// Broadcasts to [B, H, Lq, L], queries first: by tokens, or by rows of q. -inf masks a pair.
  Tensor bias{};
  /// [H]: joins every row's denominator, e^sink, with value 0; -inf is none.
  Tensor sink{};
};

/// The published slopes of alibi, [heads]: 2^(-8 (h + 1) / heads) for a power of two, else those of
/// the power below and, for the rest, every other one of the power above.
Tensor alibi_slopes(Index heads, DType dtype = DType::f32, Device device = {});

/// Terms as a configuration names them: tensors are learned, and known by their sizes.
struct TermConfig {
  enum class Alibi : unsigned char { none, published, learned };  // where slopes come from
  double softcap = 0;                                             // 0: none
  Alibi alibi = Alibi::none;
  Shape relative{};   // without the heads: {2 r + 1}, or an extent for each axis of a grid
  Shape bias{};       // of rank 4; 0 stands for the tokens of a row
  bool sink = false;  // there is one
  /// Some term has parameters.
  bool learns() const { return alibi == Alibi::learned || relative.rank() > 0 || bias.rank() > 0 || sink; }
  friend bool operator==(const TermConfig&, const TermConfig&) = default;
};
/// Reads a term: alibi none|published|learned, relative 17x17, bias 1x4x1xL (L: a row's tokens).
void read_term(TermConfig& config, std::string_view name, std::string_view text);

/// Its tensors for q of this type: learned slopes begin with the published ones, others with 0.
ScoreTerms make_terms(const TermConfig& config, Index heads, Index length, DType dtype = DType::f32);
/// f(name, tensor) of every tensor that is there: slopes, relative, bias, sink. f may replace it.
void visit_terms(ScoreTerms& terms, const std::function<void(const std::string& name, Tensor& tensor)>& f);
/// The same terms for a call with q of this type, of rows of `length` tokens.
ScoreTerms fitted_terms(ScoreTerms terms, DType dtype, Index length);

}  // namespace hilt
