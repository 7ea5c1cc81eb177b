// A coverage-guided fuzzer over everything that reads what a stranger wrote: one table, a row a
// parser. HILT_FUZZ_PARSER names the row. A parser may read or refuse: an error of ours that is no
// internal one. What it reads it must write and read again. run.sh compiles it, and says how often
// it ran.
#include <hilt/hilt.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <set>
#include <sstream>
#include <string>

#include "core/io/text.h"
#include "core/storage.h"
#include "examples/train/run.h"
#include "examples/train/tasks/vocabulary.h"

using namespace hilt;

namespace {

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

/// A file of these bytes, without a disk.
std::string file_of(std::string_view bytes) {
  static const int memory = ::memfd_create("fuzz", MFD_CLOEXEC);
  expect(::ftruncate(memory, 0) == 0, "an empty file");
  expect(::pwrite(memory, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()), "a file");
  return "/proc/self/fd/" + std::to_string(memory);
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (const std::string_view line : split_text(text, '\n')) lines.emplace_back(line);
  return lines;
}

// ---- files --------------------------------------------------------------------------------------

void npy(std::string_view bytes) {
  const std::string path = file_of(bytes);
  const Tensor x = read_npy(path);
  const std::vector<double> values = x.to_vector();
  const NpyIntegers whole = read_npy_integers(path);
  expect(whole.shape == x.shape() && whole.dtype == x.dtype(), "both readers see one array");
  for (std::size_t i = 0; i < whole.values.size() && x.dtype() != DType::i64; ++i)
    expect(static_cast<double>(whole.values[i]) == values[i], "both readers see one element");
}

void safetensors(std::string_view bytes) {
  const SafetensorsFile file(file_of(bytes));
  std::uint64_t held = 0;
  for (const SafetensorsEntry& e : file.entries()) held += file.read(e.name).bytes();
  expect(held <= bytes.size(), "tensors are no longer than their file");
}

/// Lines `key = value` become metadata whose checksum is right: what a forger can write.
void checkpoint(std::string_view text) {
  SafetensorsMetadata said{{"format", "hilt-checkpoint"}, {"format_version", "1"}, {"step", "7"}};
  for (const std::string& line : lines_of(text))
    if (const std::size_t equals = line.find('='); equals != line.npos)
      said[line.substr(0, equals)] = line.substr(equals + 1);
  std::uint64_t h = 2;
  said.erase("checksum:");
  for (const auto& [key, value] : said) h = checksum(checksum(h, key.data(), key.size()), value.data(), value.size());
  char sum[17];
  std::snprintf(sum, sizeof sum, "%016llx", static_cast<unsigned long long>(h));
  said["checksum:"] = sum;
  const Checkpoint found(file_of(safetensors_header({}, said)));
  train::Settings settings;
  program::Options options("train", "");
  train::declare(options, settings);
  train::adopt_checkpoint(options, settings, found, text.size() % 2 == 1);
  for (const auto& [key, value] : train::decisive(options, settings)) expect(!key.empty(), "a key");
  (void)train::plan_of(train::model_config(settings, 64), 0);
}

void tokenizer(std::string_view text) {
  const auto read = train::Vocabulary::pairs(text, "fuzz");
  expect(train::Vocabulary::from_text(read.text()).text() == read.text(), "a tokenizer is read as it was written");
  expect(read.decode(read.encode("token tokenizer", "fuzz")) == "token tokenizer", "tokens hold the text");
}

// ---- texts --------------------------------------------------------------------------------------

void utf8(std::string_view text) {
  std::string back;
  bool valid = true;
  for (std::size_t at = 0; at < text.size() && valid;) {
    const std::size_t begin = at;
    const std::optional<char32_t> c = next_utf8(text, at);
    if ((valid = c.has_value())) append_utf8(back, *c);
    expect(!valid || (at > begin && at <= text.size()), "a character moves on");
  }
  expect(!valid || back == text, "characters are the text");
  for (std::size_t at = 0; valid && at < text.size();) {
    const std::size_t end = train::word_end(text, at);
    expect(end > at && end <= text.size(), "a word moves on");
    at = end;
  }
  static const std::string_view names[] = {"segment", "slide", "neighborhood2d", ""};
  (void)(shown(text), near_names(text, names), program::printable(text), program::brief(std::string(text)));
}

void pattern(std::string_view text) {
  const Pattern p = parse_pattern(text);
  if (text.find("npy") == text.npos) expect(parse_pattern(to_string(p)) == p, "a pattern is read as it was written");
}

void order(std::string_view text) {
  const std::vector<std::string> lines = lines_of(text);
  const Index length = lines.size() > 1 ? number_in<Index>(lines[1]).value_or(64) : 64;
  const Order o = parse_order(lines[0], length);
  expect(parse_order(to_string(o), length) == o, "an order is read as it was written");
}

void documents(std::string_view text) {
  const std::vector<DocumentList> rows = parse_documents(text);
  expect(parse_documents(to_string(rows)) == rows, "documents are read as they were written");
}

/// Order, pattern, documents, and a line of digits: length, heads, causality, dilation mode.
void plan(std::string_view text) {
  const std::vector<std::string> lines = lines_of(text);
  if (lines.size() < 4 || lines[0].size() + lines[1].size() + lines[2].size() > 200) return;
  PlanSpec spec;
  const auto digit = [&](std::size_t i) { return i < lines[3].size() ? lines[3][i] & 7 : 0; };
  spec.length = digit(0) * 64 + digit(1) * 8 + digit(2);
  spec.heads = 1 + digit(3);
  spec.causality = static_cast<Causality>(digit(4) % 3), spec.dilation_mode = static_cast<DilationMode>(digit(5) % 4);
  spec.in_order = digit(6) == 7;
  spec.order = parse_order(lines[0], spec.length);
  spec.pattern = parse_pattern(lines[1]);
  if (!lines[2].empty()) spec.documents = parse_documents(lines[2]);
  if (digit(7) == 7) spec.queries = query_run(0, spec.length / 2);
  const Plan made(spec);
  const TileStats stats = made.stats();
  expect(stats.full + stats.partial <= stats.total && stats.pairs <= stats.tile_pairs, "tiles hold the pairs");
}

void terms(std::string_view text) {
  TermConfig config;
  for (const std::string& line : lines_of(text)) {
    const std::size_t equals = line.find('=');
    if (equals != line.npos) read_term(config, line.substr(0, equals), line.substr(equals + 1));
  }
  const auto is_small = [](const Shape& shape) {  // what is named is made
    double n = 1;
    for (const Index extent : shape) n *= static_cast<double>(extent == 0 ? 64 : extent);
    return n < 4096;
  };
  if (is_small(config.relative) && is_small(config.bias)) (void)make_terms(config, 4, 64, DType::f32);
}

/// Words of a line each, and of a file in an INI's syntax behind a line `--`.
void command(std::string_view text) {
  const std::size_t cut = text.find("\n--\n");
  std::vector<std::string> words{"train"};
  if (!text.empty())
    for (const std::string& word : lines_of(text.substr(0, cut)))
      if (!word.starts_with("--config") && !word.starts_with("--fr")) words.push_back(word);
  if (cut != text.npos) words.push_back("--config=" + file_of(text.substr(cut + 4)));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  train::Settings settings;
  program::Options options("train", "");
  train::declare(options, settings);
  if (!options.parse(static_cast<int>(words.size()), argv.data())) return;
  settings.from.clear();  // files are another row's
  train::adopt_defaults(options, settings);
  train::check_settings(options, settings);
  (void)options.command("train");
}

const struct {
  const char* name;
  void (*parse)(std::string_view);
} kParsers[] = {{"npy", npy},
                {"safetensors", safetensors},
                {"checkpoint", checkpoint},
                {"tokenizer", tokenizer},
                {"utf8", utf8},
                {"pattern", pattern},
                {"order", order},
                {"documents", documents},
                {"plan", plan},
                {"terms", terms},
                {"command", command}};

void (*chosen())(std::string_view) {
  const char* const name = std::getenv("HILT_FUZZ_PARSER");
  for (const auto& row : kParsers)
    if (name && std::string_view(name) == row.name) return row.parse;
  std::string all = "HILT_FUZZ_PARSER is one of";
  for (const auto& row : kParsers) all += std::string(" ") + row.name;
  std::fprintf(stderr, "%s\n", all.c_str());
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  static void (*const parse)(std::string_view) = chosen();
  static std::ostringstream nowhere;
  static const auto quiet = [] { return std::cout.rdbuf(nullptr), std::cerr.rdbuf(nullptr), 0; }();
  (void)quiet;
  reset_memory_peak();
  const std::size_t live = memory_stats().live;
  try {
    parse({reinterpret_cast<const char*>(data), size});
  } catch (const Error& e) { expect(e.code() != Code::internal, e.what()); }
  expect(memory_stats().peak - live <= 16 * size + (1 << 20), "tensors are as large as what they came from");
  return 0;
}
