// Formulas and initial values of Linear, the norms, Embedding and Mlp.
#include "nn/layers.h"
#include <cmath>
#include <numbers>
#include "ops/ops.h"
#include "core/io/text.h"

namespace hilt {

constexpr std::array<std::string_view, 3> kNorms{"layer", "rms", "plain"};
constexpr std::array<std::string_view, 4> kActivations{"gelu_tanh", "gelu", "relu", "silu_gated"};

static void visit_both(const std::string& at, Tensor& weight, Tensor& bias, const ParameterVisitor& visit) {
  if (weight) visit(join_name(at, "weight"), weight);
  if (bias) visit(join_name(at, "bias"), bias);
}

static DType drawn_as(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }  // and rounded once

static Tensor normal(const Shape& shape, double deviation, Generator& generator, DType dtype) {
  if (deviation == 0) return zeros(shape, dtype);  // what does not vary draws nothing
  return to(mul(randn(shape, generator.next(), drawn_as(dtype)), deviation), dtype);
}

constexpr std::array<std::string_view, 8> kInitial{"zeros",         "ones",           "normal",    "uniform",
                                                   "xavier_normal", "xavier_uniform", "he_normal", "he_uniform"};

Tensor initial_values(std::string_view name, const Shape& shape, Generator& generator, double scale, DType dtype) {
  const std::size_t kind = find_name("initial_values", name, kInitial);
  check(std::isfinite(scale) && scale >= 0, "initial_values: scale ", scale, " must be finite and not negative");
  if (kind < 2) return full(shape, kind == 0 ? 0 : 1, dtype);
  double deviation = scale;
  if (kind >= 4) {
    check(shape.rank() >= 2, "initial_values: ", name, " is for weights [.., in, out], got ", shape);
    const auto in = static_cast<double>(shape[-2]), out = static_cast<double>(shape[-1]);
    deviation *= std::sqrt(2 / std::max(1.0, kind < 6 ? in + out : in));
  }
  if (kind % 2 == 0) return normal(shape, deviation, generator, dtype);
  const double bound = kind == 3 ? scale : deviation * std::numbers::sqrt3;  // the same variance
  return to(add(mul(rand(shape, generator.next(), drawn_as(dtype)), 2 * bound), -bound), dtype);
}

Tensor Linear::operator()(const Tensor& x) const { return bias ? linear(x, weight, bias) : matmul(x, weight); }
Tensor Linear::onto(const Tensor& residual, const Tensor& x) const { return linear(x, weight, bias, residual); }
void Linear::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  visit_both(at, weight, bias, visit);
}
Linear make_linear(Index in, Index out, bool bias, double deviation, Generator& generator, DType dtype) {
  check(in >= 1 && out >= 1, "Linear: [", in, ", ", out, "] must have at least one row and column");
  return {normal({in, out}, deviation, generator, dtype), bias ? zeros({out}, dtype) : Tensor{}};
}

NormKind parse_norm_kind(std::string_view text) { return static_cast<NormKind>(find_name("norm", text, kNorms)); }
std::string_view name_of(NormKind kind) { return kNorms[static_cast<std::size_t>(kind)]; }
Tensor Norm::operator()(const Tensor& x) const {
  if (kind != NormKind::layer) return rms_norm(x, weight, epsilon);
  return layer_norm(x, weight, bias ? bias : zeros_like(weight), epsilon);
}
void Norm::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  visit_both(at, weight, bias, visit);
}
Norm make_norm(NormKind kind, Index width, bool bias, double epsilon, DType dtype) {
  return {kind, kind == NormKind::plain ? Tensor{} : ones({width}, dtype),
          bias && kind == NormKind::layer ? zeros({width}, dtype) : Tensor{}, epsilon};
}

Tensor Embedding::operator()(const Tensor& ids) const { return embedding(weight, ids); }
void Embedding::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  if (weight) visit(join_name(at, "weight"), weight);
}
Embedding make_embedding(Index tokens, Index width, double deviation, Generator& generator, DType dtype) {
  check(tokens >= 1 && width >= 1, "Embedding: [", tokens, ", ", width, "] must have at least one row and column");
  return {normal({tokens, width}, deviation, generator, dtype)};
}

Activation parse_activation(std::string_view text) { return Activation(find_name("activation", text, kActivations)); }
std::string_view name_of(Activation activation) { return kActivations[static_cast<std::size_t>(activation)]; }

Tensor Mlp::inner(const Tensor& x) const {
  if (activation == Activation::gelu_tanh) return linear_gelu_tanh(x, up.weight, up.bias);
  const Tensor h = up(x);
  if (activation == Activation::gelu) return gelu(h);
  if (activation == Activation::relu) return relu(h);
  const Index half = h.dim(-1) / 2;
  return mul(silu(slice(h, -1, 0, half)), slice(h, -1, half, 2 * half));
}
Tensor Mlp::operator()(const Tensor& x) const { return down(inner(x)); }
void Mlp::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  up.visit_parameters(join_name(at, "up"), visit);
  down.visit_parameters(join_name(at, "down"), visit);
}
Mlp make_mlp(Index width, Index hidden, Activation activation, bool bias, double deviation, double down_deviation,
             Generator& generator, DType dtype) {
  const Index columns = activation == Activation::silu_gated ? 2 * hidden : hidden;
  return {.up = make_linear(width, columns, bias, deviation, generator, dtype),
          .down = make_linear(hidden, width, bias, down_deviation, generator, dtype),
          .activation = activation};
}

}  // namespace hilt
