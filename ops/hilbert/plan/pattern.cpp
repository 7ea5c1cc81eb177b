// The text of a pattern, and builders of block lists.
#include "ops/hilbert/plan/pattern.h"
#include <set>
#include "core/io/npy.h"
#include "core/io/text.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;

constexpr std::array<std::string_view, 11> kKinds{"dense",    "segment",        "slide",          "neighborhood",
                                                  "window2d", "slide2d",        "neighborhood2d", "window3d",
                                                  "slide3d",  "neighborhood3d", "blocks"};  // by Kind
constexpr std::array<std::string_view, 4> kModes{"all_queries", "longnet", "head_groups", "residue"};
constexpr std::array<std::string_view, 3> kCausality{"none", "token", "curve"};               // by Causality
constexpr std::array<std::string_view, 4> kWorkOrders{"row", "diagonal", "hilbert", "auto"};  // by WorkOrder
constexpr std::array<std::string_view, 4> kOfSegments{"dilation", "offset", "shift", "tail"};
constexpr std::array<std::string_view, 3> kOfCenters{"dilation", "stride", "causal"};  // of slides and neighborhoods
constexpr std::array<std::string_view, 2> kOfWindows{"shift", "causal"}, kTails{"short", "borrow"};
constexpr std::array<std::string_view, 4> kLists{"local", "dilated", "global_local", "top"};  // by Lists, from local on
constexpr Index kMax = std::numeric_limits<std::int32_t>::max();

constexpr std::array<std::string_view, 11> kExamples{
    "dense",         "segment:128",          "slide:16",           "neighborhood:17",
    "window2d:8x16", "slide2d:3x3",          "neighborhood2d:5x5", "window3d:2x8x8",
    "slide3d:1x3x3", "neighborhood3d:3x5x5", "blocks:64@local:1"};  // by Kind

std::span<const std::string_view> options_of(const Branch& b) {
  if (b.kind == Kind::segment) return kOfSegments;
  if (b.dimensions() == 0) return {};
  return b.is_window() ? std::span<const std::string_view>(kOfWindows) : kOfCenters;
}

/// One branch being read. Errors open with text, branch and field: pattern (segment:0): segment: ..
struct Reader {
  std::string where;  // pattern (TEXT)
  std::string_view name, example;

  template <class... Parts> void expect(bool ok, const Parts&... parts) const {
    check(ok, where, ": ", name, ": ", parts..., "; as in ", example);
  }

  std::size_t find(const char* what, std::string_view one, std::span<const std::string_view> names) const {
    return find_name((where + ": " + std::string(name) + what).c_str(), one, names);
  }

  Index extent(std::string_view field, std::string_view text, Index low) const {
    Index n = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    expect(!text.empty() && error != std::errc::invalid_argument && end == text.data() + text.size(), field, " '", text,
           "' is not a whole number");
    expect(error == std::errc{} && n <= kMax, field, ' ', text, " must be at most ", kMax);
    expect(n >= low, field, ' ', n, " must be at least ", low);
    return n;
  }

  /// HEIGHTxWIDTH, or FRAMESxHEIGHTxWIDTH in three dimensions.
  void sides(std::string_view text, Index low, Branch& branch) const {
    const auto parts = split_text(text, 'x');
    const bool deep = branch.dimensions() == 3;
    expect(parts.size() == branch.dimensions() && !std::ranges::count(parts, std::string_view{}), '\'', text,
           "': expected ", deep ? "FRAMESxHEIGHTxWIDTH" : "HEIGHTxWIDTH");
    if (deep) branch.frames = extent("frames", parts[0], low);
    branch.rows = extent("height", parts[parts.size() - 2], low);
    branch.columns = extent("width", parts.back(), low);
  }

  void axes(std::string_view option, std::string_view text, Branch& branch) const {
    const auto parts = split_text(text, 'x');
    const std::size_t n = std::max<std::size_t>(1, branch.dimensions());
    expect(parts.size() == 1 || parts.size() == n, option, " '", text, "' has ", parts.size(),
           " numbers: expected one, or one for each of ", n, n == 1 ? " axis" : " axes");
    for (std::size_t i = 0; i < n; ++i) {
      const Index number = extent(option, parts[parts.size() == 1 ? 0 : i], option == "dilation" || option == "stride");
      Branch::Axis& axis = branch.axes[i];
      if (option == "dilation") axis.dilation = number;
      else if (option == "stride") axis.stride = number;
      else if (option == "shift") axis.shift = number;
      else {
        expect(number <= 1, "causal ", number, " must be 0 or 1");
        axis.causal = number == 1;
      }
    }
  }

  /// SIZE@LIST; the list is FILE.npy, or a rule and its numbers.
  void blocks(std::string_view argument, Branch& branch) const {
    const auto [size, text] = cut_text(argument, '@');
    expect(size != argument, '\'', argument, "': expected SIZE@LIST");
    branch.size = extent("size", size, 1);
    if (text.ends_with(".npy")) return void(branch.pairs = pairs(std::string(text)));
    const auto [rule, numbers] = cut_text(text, ':');
    branch.lists = Branch::Lists(find("", rule, kLists) + 1);
    const bool rates = branch.lists == Branch::Lists::dilated, two = branch.lists == Branch::Lists::global_local;
    if (rule != text)
      for (std::string_view number : split_text(numbers, rates ? '/' : ':'))
        branch.numbers.push_back(extent("number", number, rates || branch.lists == Branch::Lists::top));
    expect(rates ? !branch.numbers.empty() : branch.numbers.size() == (two ? 2U : 1U), '\'', text,
           "': expected local:RADIUS, dilated:R/R/.., global_local:GLOBAL:RADIUS, top:K or FILE.npy");
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
  const auto [name, argument] = cut_text(fields[0], ':');
  Branch b;
  b.kind = static_cast<Kind>(find_name(where.c_str(), name, kKinds));
  const Reader read{where, name, kExamples[static_cast<std::size_t>(b.kind)]};
  if (b.kind == Kind::dense) read.expect(name == fields[0], "takes no size, got '", argument, '\'');
  else read.expect(!argument.empty(), "needs a size");
  const Index least = !b.slides();
  if (b.on_grid()) read.sides(argument, least, b);
  else if (b.kind == Kind::blocks) read.blocks(argument, b);
  else if (b.kind != Kind::dense) b.size = read.extent(b.slides() ? "radius" : "size", argument, least);
  const auto options = options_of(b);
  std::set<std::string_view> keys;
  for (std::size_t i = 1; i < fields.size(); ++i) {
    check(!options.empty(), where, ": ", name, ": '", fields[i], "': ", name, " takes no options");
    const auto [key, value] = cut_text(fields[i], '=');
    check(keys.insert(key).second, where, ": ", name, ": ", key, " is given twice");
    const std::string_view option = options[read.find(": option", key, options)];
    if (option == "offset" && value == "head") b.offset_by_head = true;
    else if (option == "offset") b.offset = read.extent("offset", value, 0);
    else if (option == "tail") b.axes[0].borrows = read.find(": tail", value, kTails) == 1;
    else if (option == "dilation" && b.kind == Kind::segment) b.dilation = read.extent("dilation", value, 1);
    else read.axes(option, value, b);
  }
  return b;
}

/// ,dilation=2 or ,dilation=1x2x2, where an axis says other than `usual`.
template <class Field> std::string axes_text(const Branch& b, const std::string& option, Field field) {
  auto axes = std::span(b.axes).first(std::max<std::size_t>(1, b.dimensions()));
  const auto all_say = [&](auto x) { return std::ranges::all_of(axes, [&](const auto& a) { return a.*field == x; }); };
  if (all_say(Branch::Axis{}.*field)) return {};
  if (all_say(axes[0].*field)) axes = axes.first(1);
  std::string text;
  for (const Branch::Axis& axis : axes)
    text += (text.empty() ? "," + option + "=" : "x") + std::to_string(static_cast<Index>(axis.*field));
  return text;
}

/// local:1, dilated:1/2/4
std::string rule_text(const Branch& b) {
  std::string out(kLists[static_cast<std::size_t>(b.lists) - 1]);
  for (std::size_t i = 0; i < b.numbers.size(); ++i)
    out += (i > 0 && b.lists == Branch::Lists::dilated ? '/' : ':') + std::to_string(b.numbers[i]);
  return out;
}

}  // namespace

Pattern parse_pattern(std::string_view text) {
  constexpr std::string_view kPrefix = ",prefix=";  // the one option of a whole pattern
  Pattern pattern;
  const std::string where = "pattern (" + std::string(text) + ")";
  const std::size_t suffix = text.rfind(kPrefix);
  for (std::string_view merged : split_text(text.substr(0, suffix), '+'))
    for (bool joined = false; std::string_view branch : split_text(merged, '|')) {
      pattern.push_back(parse_branch(branch, where));
      pattern.back().joined = std::exchange(joined, true);
    }
  const Reader read{where, "prefix", "window2d:8x16,prefix=4, behind all else"};
  if (suffix != text.npos) pattern.back().prefix = read.extent("number", text.substr(suffix + kPrefix.size()), 0);
  return pattern;
}

std::string to_string(const Pattern& pattern) {
  std::string out;
  for (const Branch& b : pattern) {
    if (!out.empty()) out += b.joined ? '|' : '+';
    out += kKinds[static_cast<std::size_t>(b.kind)];
    if (b.lists != Branch::Lists::given) out += ":" + std::to_string(b.size) + "@" + rule_text(b);
    else if (b.kind == Kind::blocks)
      out += ":" + std::to_string(b.size) + "(" + std::to_string(b.pairs.size()) + " pairs)";
    else if (b.on_grid())
      for (std::size_t i = 0; i < b.dimensions(); ++i) out += (i == 0 ? ':' : 'x') + std::to_string(b.extent(i));
    else if (b.kind != Kind::dense) out += ":" + std::to_string(b.size);
    if (b.dilation != 1) out += ",dilation=" + std::to_string(b.dilation);
    if (b.offset_by_head) out += ",offset=head";
    else if (b.offset != 0) out += ",offset=" + std::to_string(b.offset);
    out += axes_text(b, "dilation", &Branch::Axis::dilation) + axes_text(b, "stride", &Branch::Axis::stride) +
           axes_text(b, "shift", &Branch::Axis::shift) + axes_text(b, "causal", &Branch::Axis::causal);
    if (b.axes[0].borrows) out += ",tail=borrow";
    if (b.prefix != 0) out += ",prefix=" + std::to_string(b.prefix);
  }
  return out;
}

Index behind_prefix(const Pattern& p, Index length) {
  const Index n = prefix_of(p);
  if (n > 0 && n >= length)
    fail("pattern (", to_string(p), "): a row has ", length, " tokens, none of which is behind its prefix");
  return std::max<Index>(length - n, 0);
}

DilationMode parse_dilation_mode(std::string_view text) {
  return DilationMode(find_name("dilation mode", text, kModes));
}
Causality parse_causality(std::string_view text) { return Causality(find_name("causal", text, kCausality)); }
std::string_view name_of(DilationMode mode) { return kModes[static_cast<std::size_t>(mode)]; }
WorkOrder parse_work_order(std::string_view text) { return WorkOrder(find_name("work order", text, kWorkOrders)); }
std::string_view name_of(WorkOrder order) { return kWorkOrders[static_cast<std::size_t>(order)]; }
std::string_view name_of(Causality causality) { return kCausality[static_cast<std::size_t>(causality)]; }

// ---- block lists --------------------------------------------------------------------------------
/// The pairs of keys_of(i, add): add(low, high) adds the blocks of [low, high] that row i lacks.
template <class F> static BlockPairs listed(Index n, F&& keys_of) {
  constexpr Index kMostPairs = Index{1} << 28;
  check(n >= 0 && n <= kMax, "blocks: ", n, " blocks must be 0..", kMax);
  const auto walk = [&](auto&& found) {
    for (Index i = 0; i < n; ++i) {
      Index next = 0;
      keys_of(i, [&](Index low, Index high) {
        low = std::max(low, next), high = std::min(high, n - 1);
        if (low <= high) found(i, low, high), next = high + 1;
      });
    }
  };
  Index count = 0;
  walk([&](Index, Index low, Index high) { count += high - low + 1; });
  check(count <= kMostPairs, "blocks: a list of ", count, " pairs of ", n, " blocks is too long, at most ", kMostPairs,
        "; make the blocks larger");
  BlockPairs pairs;
  pairs.reserve(static_cast<std::size_t>(count));
  walk([&](Index i, Index low, Index high) {
    for (Index j = low; j <= high; ++j) pairs.emplace_back(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
  });
  return pairs;
}

BlockPairs local_blocks(Index n, Index radius) { return global_local_blocks(n, 0, radius); }
BlockPairs dilated_blocks(Index n, const std::vector<Index>& rates) {
  std::vector<Index> steps{0};
  for (Index r : rates) steps.push_back(-r), steps.push_back(r);
  std::ranges::sort(steps);
  return listed(n, [&](Index i, auto&& add) {
    for (Index step : steps) add(i + step, i + step);
  });
}
BlockPairs global_local_blocks(Index n, Index global, Index radius) {
  return listed(n, [=](Index i, auto&& add) {
    add(0, i < global ? n - 1 : global - 1);
    add(i - radius, i + radius);
  });
}
BlockPairs built_blocks(const Branch& b, Index n) {
  switch (b.lists) {
    case Branch::Lists::local: return local_blocks(n, b.numbers[0]);
    case Branch::Lists::dilated: return dilated_blocks(n, b.numbers);
    case Branch::Lists::global_local: return global_local_blocks(n, b.numbers[0], b.numbers[1]);
    case Branch::Lists::top:  // as many as will be chosen
      return listed(n, [&](Index, auto&& add) { add(0, b.numbers[0] - 1); });
    default: return b.pairs;
  }
}

Branch blocks(Index size, BlockPairs pairs) { return {.kind = Kind::blocks, .size = size, .pairs = std::move(pairs)}; }

}  // namespace hilt
