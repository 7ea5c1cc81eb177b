// Training state to and from a directory of checkpoints.
#include "nn/training.h"
#include <filesystem>

namespace hilt {

static std::vector<SafetensorsItem> items_of(const NamedParameters& parameters, AdamWOptimizer& optimizer) {
  optimizer.prepare(parameters);
  std::vector<SafetensorsItem> items;  // they share the tensors
  for (const NamedParameter& p : parameters) items.push_back({"model." + p.name, *p.tensor});
  optimizer.visit_state([&](const std::string& name, Tensor& t) { items.push_back({"optimizer." + name, t}); });
  return items;
}

void save_training(const std::string& directory, Index step, const NamedParameters& parameters,
                   AdamWOptimizer& optimizer, const Generator& generator, Index keep) {
  check(step >= 0, "save_training: step ", step, " must not be negative");
  std::error_code failed;
  std::filesystem::create_directories(directory, failed);
  if (failed) fail_with(Code::data, directory, ": cannot make this directory: ", failed.message());
  const RandomKey noise = generator.state();
  save_checkpoint(directory, step, items_of(parameters, optimizer),
                  {{"generator.seed", std::to_string(noise.seed)}, {"generator.stream", std::to_string(noise.stream)}},
                  keep);
}

std::optional<Index> load_training(const std::string& directory, const NamedParameters& parameters,
                                   AdamWOptimizer& optimizer, Generator& generator) {
  const std::vector<Index> steps = checkpoint_steps(directory);
  if (steps.empty()) return std::nullopt;
  const Checkpoint newest(directory + '/' + checkpoint_name(steps.back()));
  const RandomKey noise{newest.get_number("generator.seed"), newest.get_number("generator.stream")};
  std::vector<SafetensorsItem> items = items_of(parameters, optimizer);
  newest.read(items);
  generator.set_state(noise);
  return newest.step();
}

}  // namespace hilt
