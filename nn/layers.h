#pragma once
#include "../core/random.h"
#include "../core/tape.h"

// A module is a plain struct of Tensors with a visit_parameters(at, visitor) that names each of
// them once; watching, counting, stepping and saving are walks over that. Here are the layers that
// a transformer is made of: aggregates, copyable (copies share the tensors), each with its formula
// in operator(). make_.. draw initial values from a Generator.

namespace [[gnu::visibility("default")]] hilt {

/// Called with "block.0.attention.qkv.weight" and the tensor itself, which it may replace.
using ParameterVisitor = std::function<void(const std::string& name, Tensor& parameter)>;

/// "at.name", or "name" where `at` is empty.
inline std::string join_name(const std::string& at, const std::string& name) {
  return at.empty() ? name : at + '.' + name;
}

/// The parameters of a module in visiting order, to be used while the module stays where it is.
struct NamedParameter {
  std::string name{};        // as visitors know it
  Tensor* tensor = nullptr;  // the module's own
};
using NamedParameters = std::vector<NamedParameter>;                     // in the order of visit_parameters()
template <class Module> NamedParameters parameters_of(Module& module) {  // all of a module, by name
  NamedParameters out;
  module.visit_parameters("", [&](const std::string& name, Tensor& p) { out.push_back({name, &p}); });
  return out;
}

/// Every parameter becomes a variable of the tape.
template <class Module> void watch_parameters(Tape& tape, Module& module) {
  module.visit_parameters("", [&](const std::string&, Tensor& p) { tape.watch(p); });
}

/// A copy of a module with tensors of its own: a mean of weights, or a reference that stays.
template <class Module> Module cloned(Module module) {
  module.visit_parameters("", [](const std::string&, Tensor& p) { p = clone(p); });
  return module;
}

template <class Module> Index parameter_count(Module& module) {  // how many numbers a module learns
  Index n = 0;
  module.visit_parameters("", [&](const std::string&, Tensor& p) { n += p.numel(); });
  return n;
}

/// Initial values by name: zeros, ones; normal (of deviation `scale`), uniform (within +-scale);
/// for weights [.., in, out] xavier_normal, xavier_uniform (variance scale^2 2 / (in + out)),
/// he_normal, he_uniform (variance scale^2 2 / in).
Tensor initial_values(std::string_view name, const Shape& shape, Generator& generator, double scale = 1,
                      DType dtype = DType::f32);

struct Linear {                                                // y = x w + b, w: [in, out]; b may be undefined
  Tensor weight{}, bias{};                                     // w, b
  Tensor operator()(const Tensor& x) const;                    // y
  Tensor onto(const Tensor& residual, const Tensor& x) const;  // residual + x w + b, in one op
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
/// Normal weights of this standard deviation, zero bias.
Linear make_linear(Index in, Index out, bool bias, double deviation, Generator& generator, DType dtype = DType::f32);

/// layer: y = (x - mean) / sqrt(var + epsilon) w + b along the last axis; without b, b is 0. rms:
/// y = x / sqrt(mean x^2 + epsilon) w; plain: without w.
enum class NormKind : unsigned char { layer, rms, plain };
NormKind parse_norm_kind(std::string_view text);
std::string_view name_of(NormKind kind);
struct Norm {                                // of the last axis; see NormKind
  NormKind kind = NormKind::layer;           // the formula
  Tensor weight{}, bias{};                   // w, b: [width]
  double epsilon = 1e-5;                     // keeps the root from 0
  Tensor operator()(const Tensor& x) const;  // y
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
/// Weights 1, biases 0.
Norm make_norm(NormKind kind, Index width, bool bias, double epsilon = 1e-5, DType dtype = DType::f32);

struct Embedding {                             // y[.., :] = weight[ids[..], :], weight: [tokens, width]
  Tensor weight{};                             // [tokens, width]
  Tensor operator()(const Tensor& ids) const;  // y
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
/// Normal weights of this deviation.
Embedding make_embedding(Index tokens, Index width, double deviation, Generator& generator, DType dtype = DType::f32);

/// What an Mlp does between its products; silu_gated: silu(x w_gate) * (x w_up), both in one.
enum class Activation : unsigned char { gelu_tanh, gelu, relu, silu_gated };
Activation parse_activation(std::string_view text);
std::string_view name_of(Activation activation);

struct Mlp {            // y = down(activation(up(x)))
  Linear up{}, down{};  // up: [width, hidden], or [width, 2 hidden] for silu_gated: the gate's columns first
  Activation activation = Activation::gelu_tanh;
  Tensor operator()(const Tensor& x) const;  // y
  Tensor inner(const Tensor& x) const;       // activation(up(x)): all but the last product
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
/// Normal weights of these deviations, zero biases.
Mlp make_mlp(Index width, Index hidden, Activation activation, bool bias, double deviation, double down_deviation,
             Generator& generator, DType dtype = DType::f32);

}  // namespace hilt
