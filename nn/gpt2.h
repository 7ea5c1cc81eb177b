#pragma once
#include "transformer.h"

namespace [[gnu::visibility("default")]] hilt {

/// A GPT-2-shaped model from a Hugging Face safetensors file, with or without "transformer." before
/// names. Sizes come from the tensors' shapes, but for the number of heads (GPT-2 has width / 64).
/// A missing, extra or misshaped tensor is an error that names it, but for masks of old files.
Transformer load_gpt2(const std::string& path, Index heads, DType dtype = DType::f32);
/// What the shapes in the file say of the model, before a tensor is read.
TransformerConfig gpt2_config(const std::string& path, Index heads);

}  // namespace hilt
