#pragma once
#include <limits>
#include <string>
#include <vector>

#include "settings.h"

// Private to train: what a run will need, before it needs it.

namespace train {

/// Bytes by kind: exact for what lasts, activations by formula, from what each op keeps.
struct MemoryPlan {
  std::size_t parameters = 0, gradients = 0, moments = 0;
  std::size_t activations = 0;  // kept between the passes
  std::size_t working = 0;      // beyond that, at the worst moment
  std::size_t plan = 0;         // of the attention plan: outside the counters of tensors
  struct Part {
    std::string name;
    std::size_t bytes;
  };
  std::vector<Part> largest;  // single tensors, or sets of alike ones, descending
  std::size_t total() const;  // or the most that 64 bits hold
};
/// Where more than `most` is needed without attention, its plan, which takes time, is not made.
MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& config, hilt::Device device = {},
                       std::size_t most = std::numeric_limits<std::size_t>::max());

Index count_parameters(const hilt::TransformerConfig& config);

/// Throws Code::memory where the plan needs more than `have`, with the five largest.
void require_memory(const MemoryPlan& plan, const Settings& s, std::size_t have);

std::string to_text(const MemoryPlan& plan);

}  // namespace train
