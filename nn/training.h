#pragma once
#include "checkpoint.h"
#include "optimizer.h"
#include "transformer.h"

// What most programs do with checkpoint.h, in one line each way.

namespace [[gnu::visibility("default")]] hilt {

/// Writes model, optimizer, generator and step to checkpoint_name(step) in a directory, which is
/// made where there is none, and keeps so many of the newest there.
void save_training(const std::string& directory, Index step, const NamedParameters& parameters, Optimizer& optimizer,
                   const Generator& generator, Index keep = 2);
/// Reads the newest of them back; its step, or nothing where there is none. Parameters must be
/// those that were written, on any device. If it throws, only the optimizer may have got state.
std::optional<Index> load_training(const std::string& directory, const NamedParameters& parameters,
                                   Optimizer& optimizer, Generator& generator);
/// The same with the model's configuration: another one throws Code::data, which names its fields.
void save_training(const std::string& directory, Index step, Transformer& model, Optimizer& optimizer,
                   const Generator& generator, Index keep = 2);
/// The newest back, as above.
std::optional<Index> load_training(const std::string& directory, Transformer& model, Optimizer& optimizer,
                                   Generator& generator);

/// One file with weights and configuration, without an optimizer.
void save_model(const std::string& path, Transformer model);
Transformer load_model(const std::string& path);  // also from what save_training() wrote of a Transformer

/// A copy of a module with its parameters on that device, or of that type: to be watched anew.
template <class Module, class To>
requires requires(Module& m, ParameterVisitor v) { m.visit_parameters("", v); }
Module to(Module module, const To& there) {
  const Tape::Pause pause;
  module.visit_parameters("", [&](const std::string&, Tensor& p) { p = to(p, there); });
  return module;
}

}  // namespace hilt
