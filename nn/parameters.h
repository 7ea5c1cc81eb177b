#pragma once
#include "../core/tape.h"

// A module is a plain struct of Tensors with a visit_parameters(at, visitor) that names each of
// them once. All that follows (watching, counting, stepping, saving) is a walk over that.

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

}  // namespace hilt
