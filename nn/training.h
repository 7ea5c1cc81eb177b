#pragma once
#include "checkpoint.h"
#include "optimizer.h"
#include "transformer.h"

// What most programs do with checkpoint.h, in one line each way; and models of others.

namespace [[gnu::visibility("default")]] hilt {

/// Writes model, optimizer, generator and step to checkpoint_name(step) in a directory, which is
/// made where there is none, and keeps so many of the newest there.
void save_training(const std::string& directory, Index step, const NamedParameters& parameters, Optimizer& optimizer,
                   const Generator& generator, Index keep = 2, const TransformerConfig* config = nullptr);
/// Reads the newest of them back; its step, or nothing where there is none. Parameters must be
/// those that were written, on any device. If it throws, only the optimizer may have got state.
std::optional<Index> load_training(const std::string& directory, const NamedParameters& parameters,
                                   Optimizer& optimizer, Generator& generator,
                                   const TransformerConfig* config = nullptr);
/// The same with the model's configuration: another one throws Code::data, which names its fields.
inline void save_training(const std::string& directory, Index step, Transformer& model, Optimizer& optimizer,
                          const Generator& generator, Index keep = 2) {
  save_training(directory, step, parameters_of(model), optimizer, generator, keep, &model.config);
}
inline std::optional<Index> load_training(const std::string& directory, Transformer& model, Optimizer& optimizer,
                                          Generator& generator) {  // the newest back, as above
  return load_training(directory, parameters_of(model), optimizer, generator, &model.config);
}

/// One file with weights and configuration, without an optimizer.
void save_model(const std::string& path, Transformer model);
Transformer load_model(const std::string& path);  // also from what save_training() wrote of a Transformer

/// A GPT-2-shaped model from a Hugging Face safetensors file, with or without "transformer." before
/// names. Sizes come from the tensors' shapes, but for the number of heads (GPT-2 has width / 64).
/// A missing, extra or misshaped tensor is an error that names it, but for masks of old files.
Transformer load_gpt2(const std::string& path, Index heads, DType dtype = DType::f32);
/// What the shapes in the file say of the model, before a tensor is read.
TransformerConfig gpt2_config(const std::string& path, Index heads);

/// A copy of a module with its parameters on that device, or of that type: to be watched anew.
template <class Module, class To>
requires requires(Module& m, ParameterVisitor v) { m.visit_parameters("", v); }
Module to(Module module, const To& there) {
  const Tape::Pause pause;
  module.visit_parameters("", [&](const std::string&, Tensor& p) { p = to(p, there); });
  return module;
}

}  // namespace hilt
