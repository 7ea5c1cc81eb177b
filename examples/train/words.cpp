// What a run says of itself before it begins, and of what to try once it is over.
#include <iostream>
#include "run.h"

namespace train {

void warn(const std::string& text) { std::cerr << "train: warning: " << program::printable(text) << std::endl; }

void describe(const Settings& s, const hilt::TransformerConfig& config, const MemoryPlan& memory) {
  const hilt::Info info = hilt::info();
  std::cout << "task " << s.task << (s.text.empty() ? "" : " " + s.text) << (s.images.empty() ? "" : " " + s.images)
            << ": " << (config.image ? config.outputs() : config.vocab) << (config.image ? " classes" : " symbols")
            << ", rows of " << s.context << ", " << s.batch * s.accumulate * s.context << " tokens a step\n"
            << "model: " << s.layers << " layers x " << s.width << ", " << s.heads << " heads, "
            << report::count(static_cast<double>(count_parameters(config))) << " parameters, " << s.dtype
            << "; attention " << s.patterns() << " in order " << order_in_force(s) << ", "
            << hilt::name_of(config.causality) << (config.causality == hilt::Causality::none ? "" : " causal")
            << program::terms_in_words(s) << ", backward " << s.backward << '\n'
            << "memory: parameters " << report::bytes(memory.parameters) << ", gradients "
            << report::bytes(memory.gradients) << ", moments " << report::bytes(memory.moments) << ", activations "
            << report::bytes(memory.activations) << ", working " << report::bytes(memory.working)
            << (memory.is_whole ? "; planned " : "; planned at least ") << report::bytes(memory.total()) << '\n'
            << "machine: " << info.threads << " threads, " << info.isa_active << ", products by " << info.blas << '\n';
  for (Index i = 0; memory.is_whole && i < std::ssize(hilt::attention_configs(config)); ++i)
    for (const std::string& line : program::oddities_of(*plan_of(config, i), i == 0 ? "--pattern" : "--pattern-odd"))
      warn(line);
}

/// As a shell reads it back.
static std::string quoted(const std::string& word) {
  if (word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+:,@%") == word.npos)
    return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return program::printable(out + "'");
}

std::string resume_command(const Settings& s) {
  std::string out = "./run train --resume --out " + quoted(s.out);
  for (const auto& [option, path] : {std::pair(" --text ", s.text), {" --images ", s.images}, {" --labels ", s.labels}})
    if (!path.empty()) out += option + quoted(path);
  return out;
}

std::string next_commands(const Settings& s) {
  const std::string again = s.is_grid() && !s.controls
                                ? "  ./run train --task " + s.task + " --controls     other patterns at equal cost\n"
                                : "  ./run sample --out " + quoted(s.out) +
                                      (s.task == "stories" ? " --prompt \"Mia has a\"" : "") + " --seed 2\n";
  const std::string other = s.is_life() ? "stories" : "life   ";
  return again + "  ./run train --task " + other +
         "             another task\n  ./run train --text FILE --seconds 300  your own text\n";
}

}  // namespace train
