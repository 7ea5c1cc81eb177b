// The text of a pattern, and builders of block lists.
#include "ops/hilbert/pattern.h"
#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include "core/npy.h"
#include "core/text.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;

constexpr std::array<std::string_view, 8> kKinds{"dense",    "segment", "slide",          "neighborhood",
                                                 "window2d", "slide2d", "neighborhood2d", "blocks"};  // by Kind
constexpr std::array<std::string_view, 4> kModes{"all_queries", "longnet", "head_groups", "residue"};  // by DilationMode
constexpr std::array<std::string_view, 3> kCausality{"none", "token", "curve"};                        // by Causality
constexpr std::array<std::string_view, 4> kWorkOrders{"row", "diagonal", "hilbert", "auto"};          // by WorkOrder
constexpr std::array<std::string_view, 2> kOptions{"dilation", "offset"};
constexpr Index kMax = std::numeric_limits<std::int32_t>::max();

Index read_extent(std::string_view text, Index low) {
  const Index n = read_index("pattern", text, low);
  check(n <= kMax, "pattern: ", n, " must be at most ", kMax);
  return n;
}

/// HEIGHTxWIDTH.
void read_sides(std::string_view text, std::string_view name, Index low, Branch& branch) {
  const auto sides = split_text(text, 'x');
  check(sides.size() == 2 && !sides[0].empty() && !sides[1].empty(), "pattern: '", name, ":", text, "': expected HEIGHTxWIDTH, as in ",
        name, ":8x16");
  branch.rows = read_extent(sides[0], low);
  branch.columns = read_extent(sides[1], low);
}

BlockPairs read_pairs(const std::string& path) {
  const Tensor file = read_npy(path);
  check(file.rank() == 2 && file.dim(1) == 2 && !is_floating(file.dtype()), "pattern: ", path,
        ": expected integers of shape [n, 2], got ", file.dtype(), file.shape());
  const std::vector<std::int64_t> flat = file.to_vector<std::int64_t>();
  BlockPairs pairs;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
    check(flat[i] >= 0 && flat[i] <= kMax && flat[i + 1] >= 0 && flat[i + 1] <= kMax, "pattern: ", path, ": row ", i / 2, " is (",
          flat[i], ", ", flat[i + 1], "); block numbers count from 0");
    pairs.emplace_back(static_cast<std::int32_t>(flat[i]), static_cast<std::int32_t>(flat[i + 1]));
  }
  return pairs;
}

Branch parse_branch(std::string_view text) {
  const auto fields = split_text(text, ',');
  const std::size_t colon = fields[0].find(':');
  const std::string_view name = fields[0].substr(0, colon);
  const std::string_view argument = colon == std::string_view::npos ? std::string_view{} : fields[0].substr(colon + 1);
  Branch b;
  b.kind = static_cast<Kind>(find_name("pattern", name, kKinds));
  if (b.kind == Kind::dense) {
    check(colon == std::string_view::npos, "pattern: dense takes no size, got '", text, "'");
  } else {
    check(!argument.empty(), "pattern: '", text, "' needs a size, as in ", name, b.kind >= Kind::window2d && b.kind != Kind::blocks ? ":8x8" : ":128");
  }
  switch (b.kind) {
    case Kind::dense: break;
    case Kind::segment: b.size = read_extent(argument, 1); break;
    case Kind::slide: b.size = read_extent(argument, 0); break;
    case Kind::neighborhood: b.size = read_extent(argument, 1); break;
    case Kind::window2d: read_sides(argument, name, 1, b); break;
    case Kind::slide2d: read_sides(argument, name, 0, b); break;
    case Kind::neighborhood2d: read_sides(argument, name, 1, b); break;
    case Kind::blocks: {
      const std::size_t at = argument.find('@');
      check(at != std::string_view::npos, "pattern: '", text, "': expected blocks:SIZE@FILE.npy");
      b.size = read_extent(argument.substr(0, at), 1);
      b.pairs = read_pairs(std::string(argument.substr(at + 1)));
      break;
    }
  }
  for (std::size_t i = 1; i < fields.size(); ++i) {
    check(b.kind == Kind::segment, "pattern: '", fields[i], "': only segments take options");
    const std::size_t equals = fields[i].find('=');
    for (std::size_t j = 1; j < i; ++j)
      check(fields[j].substr(0, fields[j].find('=')) != fields[i].substr(0, equals), "pattern: '", text, "': ", fields[i].substr(0, equals), " is given twice");
    const std::string_view value = equals == std::string_view::npos ? std::string_view{} : fields[i].substr(equals + 1);
    if (find_name("pattern option", fields[i].substr(0, equals), kOptions) == 0) b.dilation = read_extent(value, 1);
    else if (value == "head") b.offset_by_head = true;
    else b.offset = read_extent(value, 0);
  }
  return b;
}

}  // namespace

Pattern parse_pattern(std::string_view text) {
  Pattern pattern;
  for (std::string_view branch : split_text(text, '+')) pattern.push_back(parse_branch(branch));
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
Causality parse_causality(std::string_view text) { return static_cast<Causality>(find_name("causal", text, kCausality)); }
std::string_view name_of(DilationMode mode) { return kModes[static_cast<std::size_t>(mode)]; }
WorkOrder parse_work_order(std::string_view text) { return static_cast<WorkOrder>(find_name("work order", text, kWorkOrders)); }
std::string_view name_of(WorkOrder order) { return kWorkOrders[static_cast<std::size_t>(order)]; }
std::string_view name_of(Causality causality) { return kCausality[static_cast<std::size_t>(causality)]; }

// ---- block lists -----------------------------------------------------------------------------------
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
