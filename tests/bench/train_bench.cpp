// Milliseconds of a whole training step (batch to updated weights) of a few models, beside
// peers/train_bench.py, which times the same models in PyTorch. Prints one line a model; with
// --tape also what each kind of op took, with --json one of JSON instead.
//
//   hilt_train_bench [small|medium|char|gpt2] [--device cuda] [--bf16] [--bias] [--steps N] [--dropout P] [--tape]
//                    [--json]
//
// --bias: in every product and norm, as in the models of train. small and medium are sized for a
// CPU, in f32, or as the others by --bf16; char and gpt2 for a GPU, in bf16 with f32 masters.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <string>
#include <vector>
#include "core/parallel.h"
#include "core/replay.h"
#include "nn/optimizer.h"
#include "nn/transformer.h"

using namespace hilt;

namespace {

struct Setting {
  const char* name;
  TransformerConfig config;
  Index batch = 12;
  DType dtype = DType::f32;
};

Setting setting(const std::string& name) {
  Setting s{"small", {}, 12};  // nanoGPT's small character model
  s.config.bias = false;
  if (name == "medium") {
    s.name = "medium";
    s.config.layers = 6, s.config.heads = 6, s.config.width = 384, s.config.context = 256;
    s.batch = 8;
  } else if (name == "char") {  // nanoGPT's character model as it is trained on a GPU
    s.name = "char";
    s.config.layers = 6, s.config.heads = 6, s.config.width = 384, s.config.context = 256;
    s.batch = 64, s.dtype = DType::bf16;
  } else if (name == "gpt2") {  // GPT-2 of 124 million parameters, its vocabulary rounded up as is usual
    s.name = "gpt2";
    s.config.layers = 12, s.config.heads = 12, s.config.width = 768, s.config.context = 1024, s.config.vocab = 50304,
    s.config.bias = true;
    s.batch = 32, s.dtype = DType::bf16;
  }
  return s;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Trainer {
  Transformer model;
  AdamWOptimizer optimizer{AdamW{1e-3, 0.9, 0.99, 1e-8, 0.1}};
  NamedParameters parameters = parameters_of(model);
  Tensor ids, targets, loss, norm;
  Gradients gradients;
  std::vector<NodeReport> report;
  Replay replay;
  Generator noise{1};

  Trainer(const Setting& s, Device device)
      : model(make_transformer(s.config, 1, s.dtype)),
        ids(moved(randint(0, s.config.vocab, {s.batch, s.config.context}, {1, 1}), device)),
        targets(moved(randint(0, s.config.vocab, {s.batch, s.config.context}, {1, 2}), device)),
        replay(device) {
    for (const NamedParameter& p : parameters) *p.tensor = moved(*p.tensor, device);
  }

  void pass(bool profile) {
    loss = {}, gradients = {};
    Tape tape(Tape::Options{profile});
    for (const NamedParameter& p : parameters) tape.watch(*p.tensor);
    loss = model.loss(ids, targets, {.noise = model.config.dropout > 0 ? &noise : nullptr});
    gradients = tape.backward(loss);
    norm = norm_of(gradients, parameters, loss);
    if (profile) report = tape.report();
  }
  double step(bool profile) {
    if (profile) pass(true);
    else replay([&] { pass(false); });
    optimizer.step(parameters, gradients, 1e-3, {norm, 1.0});
    return loss.item();
  }
};

void run(const std::string& name, Device device, bool narrow, bool bias, int steps, double dropout, bool with_tape,
         bool json) {
  Setting s = setting(name);
  if (narrow) s.dtype = DType::bf16;
  s.config.dropout = dropout, s.config.bias = s.config.bias || bias;
  Trainer trainer(s, device);
  double loss = 0;
  for (int i = 0; i < 3; ++i) loss = trainer.step(false);
  std::vector<double> ms;
  const std::clock_t cpu = std::clock();
  const std::size_t asked = memory_stats(device).from_system;
  for (int i = 0; i < steps; ++i) {
    const double start = now_ms();
    loss = trainer.step(false);
    ms.push_back(now_ms() - start);
  }
  const std::size_t grown = memory_stats(device).from_system - asked;
  const double cpu_ms =
      static_cast<double>(std::clock() - cpu) * 1e3 / CLOCKS_PER_SEC / steps;  // what a busy machine does not distort
  std::ranges::sort(ms);
  const double median = ms[ms.size() / 2], flops = training_flops(trainer.model, s.batch, s.config.context);
  const double tokens = static_cast<double>(s.batch * s.config.context);
  if (json)
    std::printf(
        "{\"figure\": \"train_step\", \"who\": \"hilt\", \"model\": \"%s\", \"dropout\": %g, \"parameters\": %lld, "
        "\"ms\": %.3f, "
        "\"best_ms\": %.3f, \"processors_ms\": %.3f, \"tokens_per_s\": %.0f, \"tflops\": %.1f, \"peak_bytes\": %zu, "
        "\"loss\": %.4f, "
        "\"grown_bytes\": %zu}\n",
        s.name, dropout, static_cast<long long>(parameter_count(trainer.model)), median, ms.front(), cpu_ms,
        tokens / median * 1e3, flops / median * 1e-9, memory_stats(device).peak, loss, grown);
  else
    std::printf(
        "hilt %-6s %lld parameters, batch %lld x %lld: %d threads: median %.2f ms, best %.2f ms a step, %.2f ms of "
        "processors, %.1f GFLOP/s, loss %.4f, %zu blocks asked of the system\n",
        s.name, static_cast<long long>(parameter_count(trainer.model)), static_cast<long long>(s.batch),
        static_cast<long long>(s.config.context), thread_count(), median, ms.front(), cpu_ms, flops / median * 1e-6,
        loss, grown);
  if (!with_tape) return;
  struct Sum {
    double forward = 0, backward = 0;
    int count = 0;
  };
  std::map<std::string, Sum> by_name;
  for (int i = 0; i < steps; ++i) {
    trainer.step(true);
    for (const NodeReport& n : trainer.report) {
      std::string key = n.name;
      if (n.name == "matmul" || n.name.starts_with("linear")) key += " to " + std::to_string(n.output[-1]);
      Sum& sum = by_name[key];
      sum.forward += n.forward_ms, sum.backward += n.backward_ms, ++sum.count;
    }
  }
  double total = 0;
  for (const auto& [key, sum] : by_name) {
    std::printf("  %-28s x %-3d forward %8.3f ms  backward %8.3f ms\n", key.c_str(), sum.count / steps,
                sum.forward / steps, sum.backward / steps);
    total += (sum.forward + sum.backward) / steps;
  }
  std::printf("  %-28s %10.3f ms\n", "all ops", total);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> names;
  int steps = 30;
  double dropout = 0;
  bool with_tape = false, json = false, narrow = false, bias = false;
  Device device;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--steps") && i + 1 < argc) steps = std::max(1, std::atoi(argv[++i]));
    else if (!std::strcmp(argv[i], "--dropout") && i + 1 < argc) dropout = std::atof(argv[++i]);
    else if (!std::strcmp(argv[i], "--tape")) with_tape = true;
    else if (!std::strcmp(argv[i], "--json")) json = true;
    else if (!std::strcmp(argv[i], "--bias")) bias = true;
    else if (!std::strcmp(argv[i], "--bf16")) narrow = true;
    else if (!std::strcmp(argv[i], "--device") && i + 1 < argc)
      device = std::strcmp(argv[++i], "cuda") ? Device{} : Device{Device::Kind::cuda, 0};
    else names.emplace_back(argv[i]);
  }
  if (names.empty()) names = {"small", "medium"};
  for (const std::string& name : names) run(name, device, narrow, bias, steps, dropout, with_tape, json);
}
