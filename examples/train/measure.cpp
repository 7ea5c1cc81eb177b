// What is known before the first step: yardsticks, the floor, and what the machine can do.
#include <algorithm>
#include <iostream>

#include "run.h"

namespace train {
namespace {

/// Of a large product, the best of a few: on a CPU in f32, in which 16-bit types are computed too.
double peak_gflops(hilt::Device device, hilt::DType dtype) {
  const Index kSide = device.is_cpu() ? 512 : 4096;
  constexpr int kTries = 10;
  if (device.is_cpu()) dtype = hilt::DType::f32;
  const hilt::Tensor a = hilt::moved(hilt::to(hilt::randn({kSide, kSide}, {1, 1}), dtype), device);
  const hilt::Tensor b = hilt::moved(hilt::to(hilt::randn({kSide, kSide}, {1, 2}), dtype), device);
  const auto count = static_cast<double>(kSide);
  const double best = program::best_seconds(kTries, device, [&] { (void)hilt::matmul(a, b); });
  return 2 * count * count * count / best * 1e-9;
}

}  // namespace

hilt::AdamW adamw_of(const Settings& s) {
  return {.lr = s.lr, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = s.weight_decay};
}

double exact_cost(const Settings& s, const Task& task, Index rows) {
  if (s.task != "stories") return -1;
  std::vector<std::int32_t> inputs(static_cast<std::size_t>(task.length())), targets(inputs.size());
  double total = 0;
  for (Index r = 0; r < rows; ++r) {
    task.row(Split::validation, r, inputs.data(), targets.data());
    for (const double cost : story_grammar().costs(task.vocabulary().decode(targets))) total += cost;
  }
  return total / static_cast<double>(rows * task.length());
}

Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device) {
  constexpr Index kCounted = 1 << 16;  // tokens, enough for two digits of a bigram's entropy
  const Yardsticks y = yardsticks(task, std::max<Index>(1, kCounted / task.length()));
  Start start{.uniform = y.uniform, .unigram = y.unigram, .bigram = y.bigram};
  if (s.task == "stories") {
    start.floor = story_grammar().floor(s.context);
    start.floor_without_memory = story_grammar().floor_without_memory(s.context);
  } else if (s.is_life()) {
    start.floor = 0;  // the next board follows from this one
  }
  start.peak_gflops = peak_gflops(device, program::dtype_of(s.dtype));
  start.parameters = count_parameters(config);
  start.vocabulary = task.classes();
  start.tokens_per_step = s.batch * s.accumulate * s.context;
  return start;
}

std::vector<Control> train_controls(const Settings& s, std::shared_ptr<const Task> task, hilt::Device device) {
  const std::string segment = "segment:16";
  std::vector<Control> controls{{"curve segments", "hilbert:" + s.grid, segment, 0, {}},
                                {"raster segments", "row:" + s.grid, segment, 0, {}}};
  for (std::size_t i = 0; i < controls.size(); ++i) {
    Control& c = controls[i];
    std::cout << "training a control, " << c.name << " (" << c.pattern << ", " << c.order << "): " << s.steps
              << " steps" << std::endl;
    Settings same = s;
    same.order = c.order, same.pattern = c.pattern;
    Trainer trainer(model_config(same, task->classes()), task, static_cast<std::uint64_t>(s.seed),
                    program::dtype_of(s.dtype), adamw_of(s), device);
    const hilt::Schedule schedule = schedule_of(s);
    c.flops = hilt::training_flops(trainer.model(), s.batch * s.accumulate, s.context);
    while (trainer.steps() < s.steps && !interrupted()) {
      const Step step = trainer.step(s.batch, s.accumulate, schedule(trainer.steps()), s.clip);
      Line line{.step = trainer.steps(), .loss = step.loss, .lr = step.lr, .grad_norm = step.grad_norm};
      if (line.step % s.eval_every == 0 || line.step == s.steps) {
        const Evaluation e = trainer.evaluate(s.eval_rows, s.batch);
        line.val_loss = e.loss, line.val_right = e.right;
      }
      c.lines.push_back(line);
    }
    if (trainer.steps() < s.steps) controls.resize(i);  // interrupted: half a control would compare nothing
  }
  return controls;
}

}  // namespace train
