// One JSON object a line: first the configuration and the machine, then a line a step.
#include "run.h"
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace train {

static Json known(double x) { return x < 0 || !std::isfinite(x) ? Json() : Json(x); }

Json first_line(const program::Options& options, const Start& start) {
  Json configuration;
  for (const auto& [key, value, is_text, group, preset] : options.values())
    configuration[key] = is_text ? Json(value) : Json::parse(value);
  configuration["device"] = start.device, configuration["out"] = start.out;
  const hilt::Info i = hilt::info();
  return {{"configuration", configuration},
          {"order_forced", hilt::row_order_forced()},
          {"build",
           {{"version", i.version},
            {"type", i.build_type},
            {"compiler", i.compiler},
            {"blas", i.blas},
            {"isa", i.isa_active}}},
          {"machine",
           {{"devices", i.devices}, {"threads", i.threads}, {"memory", i.memory}, {"peak_gflops", start.peak_gflops}}},
          {"floor", known(start.floor)},
          {"floor_without_memory", known(start.floor_without_memory)},
          {"yardsticks", {{"uniform", start.uniform}, {"unigram", start.unigram}, {"bigram", start.bigram}}},
          {"parameters", start.parameters},
          {"vocabulary", start.vocabulary},
          {"tokens_per_step", start.tokens_per_step}};
}

/// Calls f(name, member, always) for each field of a line, in its order. One that is not there
/// `always` is there where it is above its default.
template <class F> void each_field(F&& f) {
  f("step", &Line::step, true), f("loss", &Line::loss, true);
  f("val_loss", &Line::val_loss, false), f("val_accuracy", &Line::val_right, false), f("best", &Line::best, false);
  f("skipped", &Line::skipped, false), f("loss_scale", &Line::scale, false);
  f("lr", &Line::lr, true), f("grad_norm", &Line::grad_norm, true), f("ms", &Line::ms, true);
  f("tokens_per_s", &Line::tokens_per_s, true), f("gflops", &Line::gflops, true), f("bytes", &Line::bytes, true);
}

static Json to_json(const Line& l) {
  Json j;
  each_field([&](const char* name, auto member, bool always) {
    if (always || l.*member > Line{}.*member) j[name] = l.*member;
  });
  return j;
}

/// Steps of a log, up to `after`: the first line is none, nor what a killed writer left of a last.
static std::vector<Line> read_lines(const std::string& path, Index after) {
  std::vector<Line> lines;
  std::ifstream file(path);
  file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  for (std::string text; std::getline(file, text);) {
    const Json j = Json::parse(text, nullptr, false);
    try {
      Line l;
      each_field([&](const char* name, auto member, bool always) {
        if (always || j.contains(name)) j.at(name).get_to(l.*member);
      });
      if (l.step <= after) lines.push_back(l);
    } catch (const Json::exception&) { continue; }
  }
  return lines;
}

Log::Log(program::Outputs& outputs, const program::Options& options, const Start& start, Index after)
    : path_(outputs.directory() + "/log.jsonl") {
  std::string text;
  if (after > 0) std::getline(std::ifstream(path_), text);
  const std::vector<Line> lines = after > 0 ? read_lines(path_, after) : std::vector<Line>();
  if (!lines.empty()) last_ = lines.back();
  if (!Json::accept(text)) text.clear();
  text = (text.empty() ? first_line(options, start).dump(-1, ' ', false, Json::error_handler_t::replace) : text) + '\n';
  for (const Line& l : lines) text += to_json(l).dump() + '\n';
  outputs.write("log.jsonl", text);  // a whole new file takes the old one's place: a kill now leaves either
  outputs.commit();
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor_ < 0) fail_with(Code::data, path_, ": cannot write: ", std::strerror(errno));
}

std::vector<Line> Log::lines() const { return read_lines(path_, std::numeric_limits<Index>::max()); }
Log::~Log() { ::close(descriptor_); }

void Log::sync() const {
  if (::fsync(descriptor_) != 0)
    warn(path_ + ": cannot sync: " + std::string(std::strerror(errno)) + "; lines may be missing after a power cut");
}

void Log::write(const Line& line) {
  last_ = line;
  const std::string text = to_json(line).dump() + '\n';
  const off_t end = ::lseek(descriptor_, 0, SEEK_END);
  const ssize_t written = ::write(descriptor_, text.data(), text.size());
  if (written == static_cast<ssize_t>(text.size())) return;
  const int error = written < 0 ? errno : ENOSPC;
  // A part of a line would spoil the next one too.
  const bool whole_lines = end >= 0 && ::ftruncate(descriptor_, end) == 0;
  if (std::exchange(lacks_lines_, true)) return;
  warn(path_ + ": cannot write: " + std::string(std::strerror(error)) + "; training goes on, steps from " +
       std::to_string(line.step) + " may be missing" + (whole_lines ? "" : ", and a line cut short"));
}

}  // namespace train
