// What tasks share: random numbers by count, files, batches and yardsticks.
#include "task.h"
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace train {

using namespace hilt;

// ---- random numbers -----------------------------------------------------------------------------
std::uint32_t Draws::bits() {
  const std::uint64_t block = drawn_ / 4;
  const auto four = philox({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                            static_cast<std::uint32_t>(key_.stream), static_cast<std::uint32_t>(key_.stream >> 32)},
                           key_.seed);
  return four[drawn_++ % 4];
}

Index Draws::below(Index n) {
  check(n > 0, "Draws: below ", n);
  const std::uint64_t high = bits(), random = high << 32 | bits();
  return static_cast<Index>(random % static_cast<std::uint64_t>(n));
}

// ---- files --------------------------------------------------------------------------------------
std::string content_of(const std::string& path, const std::string& option) {
  const auto bad = [&](const auto&... parts) { fail_with(Code::data, option, " (", path, "): ", parts...); };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);  // first: a pipe may have nobody at its other end
  if (std::filesystem::is_directory(status)) bad("is a directory; expected a text");
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    bad("is not a regular file; expected a text");
  std::ifstream file(path, std::ios::binary);
  if (!file) bad("cannot open: ", std::strerror(errno));
  const auto size = std::filesystem::file_size(path, error);
  std::string content(error ? 0 : size, '\0');
  if (content.empty() && file.peek() != std::ifstream::traits_type::eof())
    bad("has no size, as files in /proc; copy it to another place");
  if (!content.empty() && !file.read(content.data(), std::ssize(content))) bad("became shorter while it was read");
  return content;
}

// ---- rows and batches ---------------------------------------------------------------------------
Batch Task::batch(Split split, Index first, Index count) const {
  check(count >= 1 && first >= 0, "batch: ", count, " rows from row ", first);
  Batch b{empty({count, length_}, DType::i32), empty({count, length_}, DType::i32)};
  auto *const inputs = b.inputs.mutable_data<std::int32_t>(), *const targets = b.targets.mutable_data<std::int32_t>();
  parallel_for(count, 1, [&](Index begin, Index end) {
    for (Index r = begin; r < end; ++r) row(split, first + r, inputs + r * length_, targets + r * length_);
  });
  return b;
}

Yardsticks yardsticks(const Task& task, Index rows) {
  const Index n = task.length(), classes = task.vocabulary().size();
  constexpr double kUnseen = 0.01;  // what each counts for before it is seen
  std::vector<double> single(at(classes), kUnseen), after(at(classes), kUnseen * static_cast<double>(classes));
  std::unordered_map<Index, double> pair;
  double seen = 0;
  const auto visit = [&](Split split, auto&& f) {
    seen = 0;
    std::vector<std::int32_t> x(at(n)), y(at(n));
    for (Index r = 0; r < rows; ++r) {
      task.row(split, r, x.data(), y.data());
      for (std::size_t t = 0; t < y.size(); ++t)
        if (y[t] >= 0) f(at(x[t]), at(y[t]), pair.try_emplace(x[t] * classes + y[t], kUnseen).first->second), ++seen;
    }
  };
  visit(Split::train, [&](std::size_t x, std::size_t y, double& xy) { ++single[y], ++after[x], ++xy; });
  const double total = seen + kUnseen * static_cast<double>(classes);
  Yardsticks out{.uniform = std::log(static_cast<double>(classes))};
  visit(Split::validation, [&](std::size_t x, std::size_t y, double xy) {
    out.unigram -= std::log(single[y] / total);
    out.bigram -= std::log(xy / after[x]);
  });
  out.unigram /= seen;
  constexpr Index kMostPairs = Index{1} << 24;  // of more the rows show too few
  out.bigram = classes * classes <= kMostPairs ? out.bigram / seen : out.unigram;
  return out;
}

}  // namespace train
