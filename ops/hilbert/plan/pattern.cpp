// The text of a pattern, and builders of block lists.
#include "ops/hilbert/plan/pattern.h"
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include "core/io/npy.h"
#include "core/io/text.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;

constexpr std::array<std::string_view, 8> kKinds{"dense",    "segment", "slide",          "neighborhood",
                                                 "window2d", "slide2d", "neighborhood2d", "blocks"};  // by Kind
constexpr std::array<std::string_view, 4> kModes{"all_queries", "longnet", "head_groups",
                                                 "residue"};                                  // by DilationMode
constexpr std::array<std::string_view, 3> kCausality{"none", "token", "curve"};               // by Causality
constexpr std::array<std::string_view, 4> kWorkOrders{"row", "diagonal", "hilbert", "auto"};  // by WorkOrder
constexpr std::array<std::string_view, 2> kOptions{"dilation", "offset"};
constexpr Index kMax = std::numeric_limits<std::int32_t>::max();

constexpr std::array<std::string_view, 8> kExamples{
    "dense",         "segment:128", "slide:16",           "neighborhood:17",
    "window2d:8x16", "slide2d:3x3", "neighborhood2d:5x5", "blocks:64@FILE.npy"};  // by Kind

/// One branch being read. Errors open with the whole text, the branch and the field: pattern
/// (segment:0): segment: size 0 ..
struct Reader {
  std::string where;  // pattern (TEXT)
  std::string_view name, example;

  template <class... Parts> void expect(bool ok, const Parts&... parts) const {
    check(ok, where, ": ", name, ": ", parts..., "; as in ", example);
  }

  Index extent(const char* field, std::string_view text, Index low) const {
    Index n = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    expect(!text.empty() && error != std::errc::invalid_argument && end == text.data() + text.size(), field, " '", text,
           "' is not a whole number");
    expect(error == std::errc{} && n <= kMax, field, ' ', text, " must be at most ", kMax);
    expect(n >= low, field, ' ', n, " must be at least ", low);
    return n;
  }

  /// HEIGHTxWIDTH.
  void sides(std::string_view text, Index low, Branch& branch) const {
    const auto parts = split_text(text, 'x');
    expect(parts.size() == 2 && !parts[0].empty() && !parts[1].empty(), '\'', text, "': expected HEIGHTxWIDTH");
    branch.rows = extent("height", parts[0], low);
    branch.columns = extent("width", parts[1], low);
  }

  BlockPairs pairs(const std::string& path) const {
    const auto [dtype, shape, flat] = read_npy_integers(path);
    if (shape.rank() != 2 || shape[1] != 2 || is_floating(dtype))
      fail_with(Code::data, where, ": ", path, ": expected integers of shape [n, 2], got ", dtype, shape);
    BlockPairs pairs;
    for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
      if (flat[i] < 0 || flat[i] > kMax || flat[i + 1] < 0 || flat[i + 1] > kMax)
        fail_with(Code::data, where, ": ", path, ": row ", i / 2, " is (", flat[i], ", ", flat[i + 1],
                  "); block numbers count from 0");
      pairs.emplace_back(static_cast<std::int32_t>(flat[i]), static_cast<std::int32_t>(flat[i + 1]));
    }
    return pairs;
  }
};

Branch parse_branch(std::string_view text, const std::string& where) {
  const auto fields = split_text(text, ',');
  const std::size_t colon = fields[0].find(':');
  const std::string_view name = fields[0].substr(0, colon);
  const std::string_view argument = colon == std::string_view::npos ? std::string_view{} : fields[0].substr(colon + 1);
  Branch b;
  b.kind = static_cast<Kind>(find_name(where.c_str(), name, kKinds));
  const Reader read{where, name, kExamples[static_cast<std::size_t>(b.kind)]};
  if (b.kind == Kind::dense) read.expect(colon == std::string_view::npos, "takes no size, got '", argument, '\'');
  else read.expect(!argument.empty(), "needs a size");
  switch (b.kind) {
    case Kind::dense: break;
    case Kind::segment: b.size = read.extent("size", argument, 1); break;
    case Kind::slide: b.size = read.extent("radius", argument, 0); break;
    case Kind::neighborhood: b.size = read.extent("size", argument, 1); break;
    case Kind::window2d: read.sides(argument, 1, b); break;
    case Kind::slide2d: read.sides(argument, 0, b); break;
    case Kind::neighborhood2d: read.sides(argument, 1, b); break;
    case Kind::blocks: {
      const std::size_t at = argument.find('@');
      read.expect(at != std::string_view::npos, '\'', argument, "': expected SIZE@FILE.npy");
      b.size = read.extent("size", argument.substr(0, at), 1);
      b.pairs = read.pairs(std::string(argument.substr(at + 1)));
      break;
    }
  }
  for (std::size_t i = 1; i < fields.size(); ++i) {
    check(b.kind == Kind::segment, where, ": ", name, ": '", fields[i], "': only segments take options");
    const std::size_t equals = fields[i].find('=');
    for (std::size_t j = 1; j < i; ++j)
      check(fields[j].substr(0, fields[j].find('=')) != fields[i].substr(0, equals), where, ": ", name, ": ",
            fields[i].substr(0, equals), " is given twice");
    const std::string_view value = equals == std::string_view::npos ? std::string_view{} : fields[i].substr(equals + 1);
    if (find_name((where + ": segment: option").c_str(), fields[i].substr(0, equals), kOptions) == 0)
      b.dilation = read.extent("dilation", value, 1);
    else if (value == "head") b.offset_by_head = true;
    else b.offset = read.extent("offset", value, 0);
  }
  return b;
}

}  // namespace

Pattern parse_pattern(std::string_view text) {
  Pattern pattern;
  const std::string where = "pattern (" + std::string(text) + ")";
  for (std::string_view branch : split_text(text, '+')) pattern.push_back(parse_branch(branch, where));
  return pattern;
}

std::string to_string(const Pattern& pattern) {
  std::string out;
  for (const Branch& b : pattern) {
    if (!out.empty()) out += '+';
    out += kKinds[static_cast<std::size_t>(b.kind)];
    if (b.kind == Kind::blocks) out += ":" + std::to_string(b.size) + "(" + std::to_string(b.pairs.size()) + " pairs)";
    else if (b.kind >= Kind::window2d) out += ":" + std::to_string(b.rows) + "x" + std::to_string(b.columns);
    else if (b.kind != Kind::dense) out += ":" + std::to_string(b.size);
    if (b.dilation != 1) out += ",dilation=" + std::to_string(b.dilation);
    if (b.offset_by_head) out += ",offset=head";
    else if (b.offset != 0) out += ",offset=" + std::to_string(b.offset);
  }
  return out;
}

DilationMode parse_dilation_mode(std::string_view text) {
  return static_cast<DilationMode>(find_name("dilation mode", text, kModes));
}
Causality parse_causality(std::string_view text) {
  return static_cast<Causality>(find_name("causal", text, kCausality));
}
std::string_view name_of(DilationMode mode) { return kModes[static_cast<std::size_t>(mode)]; }
WorkOrder parse_work_order(std::string_view text) {
  return static_cast<WorkOrder>(find_name("work order", text, kWorkOrders));
}
std::string_view name_of(WorkOrder order) { return kWorkOrders[static_cast<std::size_t>(order)]; }
std::string_view name_of(Causality causality) { return kCausality[static_cast<std::size_t>(causality)]; }

// ---- block lists --------------------------------------------------------------------------------
namespace {
BlockPairs listed(Index n, auto&& attends) {
  check(n >= 0 && n <= 1 << 15, "blocks: ", n, " blocks must be 0..32768");
  BlockPairs pairs;
  for (Index i = 0; i < n; ++i)
    for (Index j = 0; j < n; ++j)
      if (attends(i, j)) pairs.emplace_back(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
  return pairs;
}
}  // namespace

BlockPairs local_blocks(Index n, Index radius) {
  return listed(n, [=](Index i, Index j) { return std::abs(i - j) <= radius; });
}
BlockPairs dilated_blocks(Index n, const std::vector<Index>& rates) {
  return listed(n, [&](Index i, Index j) { return i == j || std::ranges::count(rates, std::abs(i - j)) > 0; });
}
BlockPairs global_local_blocks(Index n, Index global, Index radius) {
  return listed(n, [=](Index i, Index j) { return i < global || j < global || std::abs(i - j) <= radius; });
}

Branch blocks(Index size, BlockPairs pairs) {
  Branch b;
  b.kind = Kind::blocks;
  b.size = size;
  b.pairs = std::move(pairs);
  return b;
}

}  // namespace hilt
