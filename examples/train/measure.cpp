// What is known before the first step: yardsticks, the floor, and what the machine can do.
#include <iostream>
#include <numeric>
#include "run.h"

namespace train {

hilt::AdamW adamw_of(const Settings& s) {
  return {.lr = s.lr, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = s.weight_decay};
}

Task::Exact exact_of(const Task& task, Index rows) {
  std::vector<Task::Exact> each(static_cast<std::size_t>(rows));
  hilt::parallel_for(rows, 1, [&](Index begin, Index end) {
    std::vector<std::int32_t> inputs(static_cast<std::size_t>(task.length())), targets(inputs.size());
    for (Index r = begin; r < end; ++r) {
      task.row(Split::validation, r, inputs.data(), targets.data());
      each[static_cast<std::size_t>(r)] = task.exact(inputs.data(), targets.data());
    }
  });
  Task::Exact sum{0, 0};
  for (const Task::Exact& e : each) sum.cost += e.cost, sum.right += e.right;
  const double targets = static_cast<double>(rows * task.targets());
  return each[0].cost < 0 ? Task::Exact{} : Task::Exact{sum.cost / targets, sum.right / targets};
}

Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device) {
  constexpr Index kCounted = 1 << 16;  // tokens, enough for two digits of a bigram's entropy
  Start start{yardsticks(task, std::max<Index>(1, kCounted / task.length()))};
  if (s.task == "stories") {
    start.floor = story_grammar().floor(s.context);
    start.floor_without_memory = story_grammar().floor_without_memory(s.context);
  } else {
    start.floor = s.is_life() ? 0 : exact_of(task, s.eval_rows).cost;  // the next board follows from this one
  }
  start.peak_gflops = program::product_gflops(device, program::dtype_of(s.dtype), device.is_cpu() ? 512 : 4096);
  start.parameters = count_parameters(config);
  start.vocabulary = task.classes();
  start.tokens_per_step = s.batch * s.accumulate * s.context;
  return start;
}

/// Trains it for one seed; false if that was interrupted.
static bool train_control(Control& c, const Settings& s, const std::shared_ptr<const Task>& task, double floor,
                          hilt::Device device) {
  Trainer trainer(model_config(s, task->tokens(), task->classes()), task, static_cast<std::uint64_t>(s.seed),
                  program::dtype_of(s.dtype), adamw_of(s), device);
  const hilt::Schedule schedule = schedule_of(s);
  c.flops = hilt::training_flops(trainer.model(), s.batch * s.accumulate, s.context);
  while (trainer.steps() < s.steps && !interrupted()) {
    Line line{trainer.step(s.batch, s.accumulate, schedule(trainer.steps()), s.clip)};
    line.step = trainer.steps();
    if (line.step % s.eval_every == 0 || line.step == s.steps) {
      const Evaluation e = trainer.evaluate(s.eval_rows, s.batch);
      line.val_loss = e.loss, line.val_right = e.right;
    }
    if (c.scores.empty()) c.lines.push_back(line);
  }
  if (trainer.steps() < s.steps) return false;
  const Evaluation e = trainer.evaluate(4 * s.eval_rows, s.batch);
  c.scores.push_back({e, floor});
  return true;
}

Score Control::mean() const {
  Score sum;
  const double n = static_cast<double>(scores.size());
  for (const Score& s : scores) sum.loss += s.loss / n, sum.right += s.right / n, sum.floor += (s.floor + 1) / n;
  return sum;
}

std::vector<Control> train_controls(const Settings& s, std::shared_ptr<const Task> task, hilt::Device device) {
  const std::string curve = "hilbert:" + s.grid, row = "row:" + s.grid, segment = "segment:16";
  const std::string odd = s.is_life() ? "" : segment + ",shift=8";
  std::vector<Control> controls{{"curve segments", curve, segment, odd}, {"raster segments", row, segment, odd}};
  if (!s.is_life()) controls.push_back({"2-D windows", row, "window2d:4x4", "window2d:4x4,shift=2x2"});
  for (Index i = 0; i < s.control_seeds; ++i) {
    Settings same = s;
    same.seed = s.seed + i;
    const std::shared_ptr<const Task> rows = i == 0 ? task : std::shared_ptr<const Task>(make_task(same));
    const double floor = exact_of(*rows, 4 * s.eval_rows).cost;
    for (Control& c : controls) {
      same.order = c.order, same.pattern = c.pattern, same.pattern_odd = c.pattern_odd;
      std::cout << "training a control, " << c.name << " (" << same.patterns() << ", " << c.order << "): " << s.steps
                << " steps, seed " << same.seed << std::endl;
      if (train_control(c, same, rows, floor, device)) continue;
      // Interrupted: half a control would compare nothing, and some seeds not the same.
      std::erase_if(controls, [&](const Control& of) { return std::ssize(of.scores) < std::max<Index>(1, i); });
      for (Control& of : controls) of.scores.resize(static_cast<std::size_t>(std::max<Index>(1, i)));
      return controls;
    }
  }
  return controls;
}

std::string in_words(const std::vector<Control>& controls, const std::string& target) {
  std::string text;
  for (const Control& c : controls) {
    const Score m = c.mean();
    text += format("control, %s (%s%s%s, %s): %.3f %% of %ss right", c.name.c_str(), c.pattern.c_str(),
                   c.pattern_odd.empty() ? "" : " / ", c.pattern_odd.c_str(), c.order.c_str(), 100 * m.right,
                   target.c_str());
    text += format(m.floor < 0 ? ", loss %.4f\n" : ", %.4f nats above the floor\n", m.excess());
  }
  for (const Difference& d : differences_of(controls))
    text += format("%s: %+.4f nats, spread %.4f, %s\n", d.name.c_str(), d.mean, d.spread,
                   d.is_larger() ? "larger than twice the spread" : "within it");
  return text;
}

std::vector<Difference> differences_of(const std::vector<Control>& controls) {
  std::vector<Difference> out;
  for (std::size_t a = 0; a < controls.size(); ++a)
    for (std::size_t b = a + 1; b < controls.size(); ++b) {
      std::vector<double> each;
      for (std::size_t i = 0; i < controls[a].scores.size(); ++i)
        each.push_back(controls[b].scores[i].excess() - controls[a].scores[i].excess());
      if (each.size() < 2) continue;
      const double n = static_cast<double>(each.size()), mean = std::accumulate(each.begin(), each.end(), 0.0) / n;
      double squares = 0;
      for (const double x : each) squares += (x - mean) * (x - mean);
      out.push_back({controls[b].name + " above " + controls[a].name, mean, std::sqrt(squares / (n - 1))});
    }
  return out;
}

}  // namespace train
