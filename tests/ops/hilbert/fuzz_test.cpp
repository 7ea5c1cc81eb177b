// Seeded configurations of attention, each judged against the brute force of
// tests/support/reference.h.
//
//   HILT_FUZZ_SEED=n     that one configuration, printed
//   HILT_TEST_DEVICE=cuda  on a GPU, against the same references; what was drawn in f64 runs in f32
//   HILT_FUZZ_COUNT=n    so many, from HILT_FUZZ_FIRST (1) on; 5,000 unless told (the second tier of CI: 20,000),
//                        1,000 with HILT_TEST_SCALE=small
//
// What is judged, for every configuration: the plan against the dense multiplicity table; taped,
// hybrid and fused forward and backward; lse; hybrid = fused bit for bit; fused bit for bit on
// another number of threads, and without the sequences beside one; that a NaN shows exactly where
// the formulas put it; that inputs, terms and d_lse, and the NaNs between and around them, are
// neither read nor written. Freed memory is full of NaN.

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/io/text.h"
#include "core/parallel.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/reference.h"
#include "tests/support/scale.h"

using namespace hilt;

namespace {

using Kind = Branch::Kind;
using Scope = Order::Scope;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

Device device_under_test() {
  static const Device device = [] {
    const char* const text = std::getenv("HILT_TEST_DEVICE");
    return device_named(text ? text : "cpu");
  }();
  return device;
}

// ---- a configuration ----------------------------------------------------------------------------

/// SplitMix64: a seed is a configuration, on every platform.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x632BE59BD9B4E019u) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  Index below(Index n) { return static_cast<Index>(next() % static_cast<std::uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
  template <class T> T pick(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<Index>(list.size()))];
  }

 private:
  std::uint64_t state_;
};

/// How an operand lies in memory. NaN fills whatever lies between and around its elements.
enum class Layout : unsigned char {
  dense,
  padded_heads,
  heads_first,
  every_other_token,
  every_other_feature,
  batch_expanded,
  all_expanded
};
constexpr const char* kLayouts[] = {
    "dense",          "padded_heads", "heads_first", "every_other_token", "every_other_feature",
    "batch_expanded", "all_expanded"};
enum class Alias : unsigned char { none, k_is_v, all_one, packed };
constexpr const char* kAliases[] = {"none", "k = v", "q = k = v", "packed"};
enum class Logits : unsigned char {
  ordinary,
  wide,
  shifted
};  // wide: +-1e4; shifted: a row's around +1e4 or around -1e4
constexpr const char* kLogits[] = {"ordinary", "+-1e4", "around +1e4 or -1e4"};
enum class Bad : unsigned char { none, key, query, cotangent };  // which row of it is NaN
constexpr const char* kBads[] = {"none", "key and value row", "query row", "d_o row"};
constexpr const char* kKinds[] = {"dense",          "segment",  "slide",   "neighborhood",   "window2d", "slide2d",
                                  "neighborhood2d", "window3d", "slide3d", "neighborhood3d", "blocks"};
constexpr const char* kOrders[] = {"row", "snake", "morton", "tiles", "hilbert", "auto", "given"};
constexpr const char* kScopes[] = {"global", "per_segment", "chunked", "order_only"};
constexpr const char* kDilationModes[] = {"all_queries", "longnet", "head_groups", "residue"};
constexpr const char* kCausalities[] = {"none", "token", "curve"};
constexpr const char* kModes[] = {"taped", "hybrid", "fused"};
enum class Alibi : unsigned char { none, published, learned };
enum class Mask : unsigned char { none, pairs, row };  // what a bias of -inf masks
constexpr const char* kAlibis[] = {"none", "published", "learned"};
constexpr const char* kMasks[] = {"nothing", "pairs", "a row"};
constexpr const char* kTerms[] = {"slopes", "table", "bias", "sink"};
constexpr Backward kBackwards[] = {Backward::taped, Backward::hybrid, Backward::fused};

struct Config {
  std::uint64_t seed = 0;  // of the values, too
  PlanSpec spec;
  Index batch = 1, kv_heads = 1, dim = 1;
  DType dtype = DType::f64;
  std::array<Layout, 4> layout{};  // q, k, v, d_o
  Alias alias = Alias::none;
  Logits logits = Logits::ordinary;
  Bad bad = Bad::none;
  double dropout = 0;
  std::optional<double> scale;
  unsigned watched = 7;  // bits: q, k, v
  double softcap = 0;
  Alibi alibi = Alibi::none;
  std::vector<Index> table;  // relative: its extents
  int points = 0;            // it looks at points: 1, of all rows; 2, of each
  int bias = -1;             // bits: which of batch, heads, queries and keys it has; -1: none
  bool narrow_bias = false, turned_bias = false, sink = false, d_lse = false;
  Mask mask = Mask::none;
  bool by_call = false;                 // spec.given is told by each call, and the plan is of any order
  bool each_row = false, wide = false;  // as [B, L]; of i64
  bool silent = false;                  // spec.queries are the last rows, and the plan does not say so
  DType stat() const { return dtype == DType::f64 ? dtype : DType::f32; }
  bool has_terms() const { return softcap > 0 || alibi != Alibi::none || !table.empty() || bias >= 0 || sink; }
  Shape bias_shape() const {
    const Index full[] = {batch, spec.heads, spec.length, spec.length};
    Shape s;
    for (int i = 0; i < 4; ++i) s.push_back(bias >> i & 1 ? full[i] : 1);
    return s;
  }
};

Index prefix_in(const PlanSpec& p) { return p.pattern.back().prefix; }
/// What order and pattern are of, where there are no documents.
Index behind(const PlanSpec& p) { return std::max<Index>(p.length - prefix_in(p), 0); }

template <class E> const char* name(const char* const* names, E e) { return names[static_cast<std::size_t>(e)]; }

/// Written out field by field: the library's to_string is under test elsewhere.
std::string describe(const Config& c) {
  std::ostringstream s;
  const PlanSpec& p = c.spec;
  s << "seed " << c.seed << ": B " << c.batch << " L " << p.length << " H " << p.heads << '/' << c.kv_heads << " D "
    << c.dim << ' ' << c.dtype << "; order " << name(kOrders, p.order.kind) << ' ' << name(kScopes, p.order.scope);
  if (p.order.scope == Scope::chunked) s << ' ' << p.order.chunk;
  if (!p.order.folds())
    s << " on " << p.order.grid.frames << " x " << p.order.grid.height << " x " << p.order.grid.width;
  if (p.order.kind == Order::Kind::tiles) s << " tile " << p.order.tile_height << " x " << p.order.tile_width;
  if (p.order.steps == Steps::unit) s << " unit steps";
  s << "; " << name(kDilationModes, p.dilation_mode) << "; causality " << name(kCausalities, p.causality)
    << "; pattern";
  for (const Branch& b : p.pattern) {
    s << (b.joined ? " | [" : " [") << name(kKinds, b.kind) << " size " << b.size << " dilation " << b.dilation
      << " offset ";
    if (b.offset_by_head) s << "head";
    else s << b.offset;
    s << ' ' << b.frames << 'x' << b.rows << 'x' << b.columns;
    for (const Branch::Axis& a : b.axes)
      if (a != Branch::Axis{})
        s << " axis " << &a - b.axes.data() << " (dilation " << a.dilation << " stride " << a.stride << " shift "
          << a.shift << (a.causal ? " causal)" : ")");
    if (b.kind == Kind::blocks) {
      s << " rule " << static_cast<int>(b.lists);
      for (const Index number : b.numbers) s << ' ' << number;
      s << " {";
      for (const auto& [i, j] : b.pairs) s << '(' << i << ',' << j << ')';
      s << '}';
    }
    s << ']';
  }
  if (prefix_in(p) > 0) s << " prefix " << prefix_in(p);
  for (const DocumentList& list : p.documents) {
    s << "; documents";
    for (const Document& d : list)
      s << ' ' << d.length << " (" << d.grid.frames << " x " << d.grid.height << " x " << d.grid.width << ')';
  }
  s << "; layouts";
  for (const Layout l : c.layout) s << ' ' << name(kLayouts, l);
  s << "; alias " << name(kAliases, c.alias) << "; logits " << name(kLogits, c.logits) << "; bad " << name(kBads, c.bad)
    << "; dropout " << c.dropout << "; scale ";
  if (c.scale) s << *c.scale;
  else s << "default";
  s << "; watched " << (c.watched & 1 ? "q" : "") << (c.watched & 2 ? "k" : "") << (c.watched & 4 ? "v" : "")
    << "; softcap " << c.softcap << "; alibi " << name(kAlibis, c.alibi) << "; table";
  for (const Index extent : c.table) s << ' ' << extent;
  if (c.points > 0) s << (c.points == 1 ? " by points" : " by points of each row");
  s << "; bias " << (c.bias < 0 ? Shape{} : c.bias_shape()) << (c.narrow_bias ? " narrow" : "")
    << (c.turned_bias ? " turned" : "") << " masks " << name(kMasks, c.mask) << "; sink " << c.sink << "; d_lse "
    << c.d_lse;
  if (!p.given.empty()) s << "; given by " << (c.by_call ? c.each_row ? "each row" : "the call" : "the plan") << ':';
  for (const std::int32_t token : p.given) s << ' ' << token;
  if (p.queries) s << (c.silent ? "; queries, unsaid" : "; queries");
  if (p.queries)
    for (const std::int32_t row : *p.queries) s << ' ' << row;
  return s.str();
}

// ---- drawing one --------------------------------------------------------------------------------

constexpr Index kTile = Tiling::kTile;

Index draw_size(Rng& r, Index length) {
  return std::max<Index>(1, r.pick<Index>({1,
                                           2,
                                           3,
                                           4,
                                           5,
                                           7,
                                           8,
                                           16,
                                           31,
                                           32,
                                           64,
                                           kTile - 1,
                                           kTile,
                                           kTile + 1,
                                           length - 1,
                                           length,
                                           length + 1,
                                           2 * length,
                                           length / 2,
                                           (length + 1) / 2,
                                           (length + 2) / 3,
                                           length / 3 + 1,
                                           1 + r.below(length + 3)}));
}

Index odd_at_most(Rng& r, Index limit) { return 1 + 2 * r.below((limit + 1) / 2); }

/// Options of an axis of n cells, and a number of keys that fits them.
void draw_axis(Rng& r, const Branch& b, Index n, Branch::Axis& axis, Index& size) {
  const bool window = b.kind == Kind::window2d || b.kind == Kind::window3d;
  axis.causal = r.chance(40);
  if (window) {
    axis.shift = r.below(size);
    return;
  }
  axis.dilation = r.pick<Index>({1, 1, 2, 2, 3, 4, n, n + 1});
  axis.stride = r.pick<Index>({1, 1, 2, 3, 4, 7, n});
  if (b.kind == Kind::slide || b.kind == Kind::slide2d || b.kind == Kind::slide3d) return;
  if (axis.causal && r.chance(50)) size = 1 + r.below(9);
  if (axis.dilation > 1) size = std::min(size, std::max<Index>(1, n / axis.dilation));
  if (!axis.causal) size -= 1 - size % 2;
}
void draw_axes(Rng& r, const Grid& grid, Index length, Branch& b) {
  if (b.dimensions() == 1) return draw_axis(r, b, length, b.axes[0], b.size);
  const std::array<Index, 3> cells{grid.frames, grid.height, grid.width};
  const std::array<Index*, 3> sizes{&b.frames, &b.rows, &b.columns};
  for (std::size_t i = 0; i < b.dimensions(); ++i)
    if (const std::size_t on = i + 3 - b.dimensions(); r.chance(70)) draw_axis(r, b, cells[on], b.axes[i], *sizes[on]);
}

Branch draw_branch(Rng& r, Kind kind, Index length, const Grid& grid) {
  Branch b;
  b.kind = kind;
  switch (kind) {
    case Kind::dense: break;
    case Kind::segment:
      b.size = draw_size(r, length);
      if (r.chance(55)) {
        b.dilation = r.pick<Index>({2, 2, 3, 4, 5, 8, b.size, b.size + 1, 2 * b.size + 1, length + 1, 2 * length + 3});
        if (r.chance(30)) b.offset_by_head = true;
        else if (r.chance(50)) b.offset = r.chance(50) ? r.below(b.dilation) : r.below(std::min(b.dilation, b.size));
      } else b.axes[0].borrows = r.chance(40);
      if (r.chance(30)) b.axes[0].shift = r.chance(50) ? r.below(b.size) : b.size / 2;
      break;
    case Kind::slide:
      b.size = r.pick<Index>({0, 1, 2, 3, 5, 9, kTile - 1, kTile, length - 1, length, 2 * length});
      break;
    case Kind::neighborhood:
      b.size = std::min(odd_at_most(r, r.chance(60) ? std::min<Index>(length, 9) : length), odd_at_most(r, length));
      break;
    case Kind::window3d: b.frames = r.pick<Index>({1, 2, 3, grid.frames}); [[fallthrough]];
    case Kind::window2d:
      b.rows = r.pick<Index>({1, 2, 3, 4, 7, grid.height, grid.height + 1});
      b.columns = r.pick<Index>({1, 2, 3, 4, 7, grid.width, grid.width + 1});
      break;
    case Kind::slide3d: b.frames = r.pick<Index>({0, 1, 2, grid.frames}); [[fallthrough]];
    case Kind::slide2d:
      b.rows = r.pick<Index>({0, 1, 2, 3, grid.height});
      b.columns = r.pick<Index>({0, 1, 2, 3, grid.width});
      break;
    case Kind::neighborhood3d: b.frames = odd_at_most(r, grid.frames); [[fallthrough]];
    case Kind::neighborhood2d:
      b.rows = odd_at_most(r, std::min<Index>(grid.height, r.chance(70) ? 7 : 99));
      b.columns = odd_at_most(r, std::min<Index>(grid.width, r.chance(70) ? 7 : 99));
      break;
    case Kind::blocks: {
      b.size = r.pick<Index>({1, 2, 3, 5, 8, 16, 32, 64, kTile, kTile + 1, length, length + 1});
      b.size = std::max<Index>(b.size, (length + 23) / 24);
      const Index n = (length + b.size - 1) / b.size;
      switch (r.below(5)) {
        case 0: b.lists = Branch::Lists::local, b.numbers = {r.below(3)}; break;
        case 1: b.lists = Branch::Lists::dilated, b.numbers = {1 + r.below(3), 3 + r.below(3)}; break;
        case 2: b.lists = Branch::Lists::global_local, b.numbers = {r.below(2) + (n > 1), r.below(2)}; break;
        default: {
          const int density = r.pick({3, 10, 30, 60});
          for (Index i = 0; i < n; ++i)
            for (Index j = 0; j < n; ++j)
              if (r.chance(density)) b.pairs.emplace_back(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
          for (std::size_t i = b.pairs.size(); i > 1; --i)
            std::swap(b.pairs[i - 1], b.pairs[at(r.below(static_cast<Index>(i)))]);
        }
      }
      break;
    }
  }
  if (b.dimensions() > 0 && !b.axes[0].borrows && r.chance(50)) draw_axes(r, grid, length, b);
  return b;
}

/// Whether a kind has the axes it compares on.
bool fits(Kind kind, const Order& order, const Grid& grid, Index length) {
  const bool flat = kind >= Kind::window2d && kind <= Kind::neighborhood2d,
             deep = kind >= Kind::window3d && kind <= Kind::neighborhood3d;
  const bool square = !order.folds() || (grid.width == grid.height && grid.cells() == length);
  return (!flat && !deep) || (square && (deep || grid.frames == 1));
}

/// Multiply-adds of one product over all pairs, about; and the work of the tables.
double work_of(const Config& c) {
  const PlanSpec& p = c.spec;
  const double n = static_cast<double>(p.length);
  double keys = 0;
  for (const Branch& b : p.pattern) {
    double here = n;
    if (b.kind == Kind::segment) here = std::min(n, static_cast<double>(b.size)) / static_cast<double>(b.dilation) + 1;
    if (b.kind == Kind::slide) here = std::min(n, 2.0 * static_cast<double>(b.size) + 1);
    if (b.kind == Kind::neighborhood) here = static_cast<double>(b.size);
    if (b.kind == Kind::window2d || b.kind == Kind::neighborhood2d)
      here = std::min(n, static_cast<double>(b.rows * b.columns));
    if (b.kind == Kind::slide2d) here = std::min(n, static_cast<double>((2 * b.rows + 1) * (2 * b.columns + 1)));
    if (b.kind == Kind::window3d || b.kind == Kind::neighborhood3d)
      here = std::min(n, static_cast<double>(b.frames * b.rows * b.columns));
    if (b.kind == Kind::slide3d)
      here = std::min(n, static_cast<double>((2 * b.frames + 1) * (2 * b.rows + 1) * (2 * b.columns + 1)));
    if (b.kind == Kind::blocks)
      here = std::min(n, static_cast<double>(built_blocks(b, (p.length + b.size - 1) / b.size).size()) *
                                 static_cast<double>(b.size * b.size) / n +
                             1);
    keys += std::min(here, n) + 2 * static_cast<double>(prefix_in(p));
  }
  const bool by_head =
      p.dilation_mode == DilationMode::head_groups ||
      std::any_of(p.pattern.begin(), p.pattern.end(), [](const Branch& b) { return b.offset_by_head; });
  return static_cast<double>(c.batch * p.heads * c.dim) * n * keys +
         2 * n * n * static_cast<double>(p.pattern.size()) * (by_head ? static_cast<double>(p.heads) : 1);
}

/// One list for all rows; those with lists of their own are judged in documents_test.cpp.
void draw_documents(Rng& r, PlanSpec& p) {
  if (std::any_of(p.pattern.begin(), p.pattern.end(), [](const Branch& b) { return b.kind == Kind::blocks; })) return;
  const bool planar = std::ranges::any_of(p.pattern, &Branch::on_grid);
  const bool deep = planar && walks(p.order.kind, {1, 1, 2}) &&
                    std::ranges::none_of(p.pattern, [](const Branch& b) { return b.dimensions() == 2; });
  p.order.grid = {}, p.order.steps = Steps::near;
  DocumentList list;
  for (Index left = p.length; left > 0 && !r.chance(10); left -= list.back().length) {
    if (!list.empty() && list.back().length <= left && r.chance(30)) {
      const Document again = list.back();
      list.push_back(again);
    } else if (planar || r.chance(30)) {
      const Index height = 1 + r.below(std::min<Index>(left, 9));
      const Index width = 1 + r.below(std::min<Index>(left / height, 20));
      list.emplace_back(Grid{width, height, deep ? 1 + r.below(std::min<Index>(left / height / width, 4)) : 1});
    } else {
      list.emplace_back(r.chance(50) ? 1 + r.below(left) : std::min(left, draw_size(r, p.length)));
    }
  }
  p.documents = {list};
  for (Branch& b : p.pattern)  // the classes of a short document may be too small for the keys
    for (std::size_t i = 0; i < b.dimensions(); ++i)
      for (const Document& d : list) {
        const Grid& g = d.grid;
        const Index cells = b.on_grid() ? std::array{g.frames, g.height, g.width}[i + 3 - b.dimensions()] : d.length;
        if (b.extent(i) > cells / b.axes[i].dilation) b.axes[i].dilation = 1;
      }
}

/// How many axes a table on the grid can have; 1: there is none, or documents have this and that.
int axes_of(const PlanSpec& p) {
  const auto axes = [](const Grid& g) { return g.has_frames() ? 3 : 2; };
  if (p.documents.empty()) return p.order.folds() || p.order.grid.cells() != behind(p) ? 1 : axes(p.order.grid);
  const std::vector<Document>& list = p.documents[0];
  const bool alike = std::ranges::all_of(
      list, [&](const Document& d) { return !d.folds() && axes(d.grid) == axes(list.front().grid); });
  return list.empty() || !alike ? 1 : axes(list.front().grid);
}

/// First tokens outside the pattern, which are as many more; or, rarely, all but one.
void draw_prefix(Rng& r, PlanSpec& p) {
  const Index n = r.pick<Index>({1, 1, 2, 3, 4, 7, 16, kTile, kTile + 5});
  p.pattern.back().prefix = n;
  const bool folds = p.order.folds() && std::ranges::none_of(p.pattern, [](const Branch& b) {
                       return b.on_grid() || b.kind == Kind::blocks || b.axes != Branch{}.axes;
                     });
  if (p.documents.empty() && folds && r.chance(5)) p.length = n + 1;
  else if (p.documents.empty()) p.length = std::max<Index>(p.length, 1) + n;
  for (DocumentList& list : p.documents)
    for (Document& d : list) d.length += n, p.length += n;
}

void draw_terms(Rng& r, Config& c) {
  if (r.chance(30)) c.softcap = r.pick({0.5, 2.0, 30.0});
  if (r.chance(35)) c.alibi = r.pick({Alibi::published, Alibi::learned});
  if (r.chance(40)) {
    c.table = {1 + 2 * r.pick<Index>({0, 1, 2, 3, 8, 40})};
    if (const int axes = axes_of(c.spec); axes > 1 && r.chance(70))
      for (int more = axes - 1; more > 0; --more) c.table.push_back(1 + 2 * r.below(4));
  }
  if (r.chance(40)) {
    c.bias = static_cast<int>(r.below(16));
    c.narrow_bias = r.chance(50), c.turned_bias = r.chance(30);
    c.mask = r.pick({Mask::none, Mask::none, Mask::pairs, Mask::row});
  }
  c.sink = r.chance(30);
  c.d_lse = r.chance(40) && c.alias != Alias::packed;
}

void draw_queries(Rng& r, Config& c) {
  const Index length = c.spec.length;
  const Index n = std::min(length, r.pick<Index>({0, 1, 1, 1, 2, 3, 17, length / 2, length - 1, length}));
  switch (r.below(3)) {
    case 0: c.spec.queries = query_run(r.below(length - n + 1), n); break;
    case 1: c.spec.queries = query_run(length - n, n), c.silent = true; break;
    default:
      c.spec.queries.emplace();
      for (Index t = 0, left = n; t < length && left > 0; ++t)
        if (r.below(length - t) < left) c.spec.queries->push_back(static_cast<std::int32_t>(t)), --left;
  }
}

/// A length; the order gets a grid of so many cells, or is folded.
Index draw_length(Rng& r, Order& order) {
  if (r.chance(40)) {
    if (r.chance(40)) order.grid.width = order.grid.height = r.pick<Index>({1, 2, 4, 8, 8, 16, 16});
    else
      order.grid.width = r.pick<Index>({1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 19, 32}),
      order.grid.height = r.pick<Index>({1, 2, 3, 4, 5, 7, 8, 9, 16, 17});
    if (r.chance(20) && (order.kind == Order::Kind::hilbert || order.kind == Order::Kind::row)) {
      order.grid = {r.pick<Index>({1, 2, 3, 4, 7}), r.pick<Index>({2, 3, 4, 6}), r.pick<Index>({2, 3, 4, 5})};
      order.steps = Steps::near;
    }
    return order.grid.cells();
  }
  if (r.chance(30)) {
    const Index w = r.pick<Index>({2, 3, 4, 5, 8, 16, 32, 64, kTile});
    return std::max<Index>(1, w * r.pick<Index>({1, 1, 2, 3, 4}) + r.pick<Index>({-1, 0, 1}));
  }
  return r.pick<Index>({1,
                        1,
                        2,
                        3,
                        5,
                        7,
                        11,
                        13,
                        16,
                        17,
                        23,
                        29,
                        31,
                        37,
                        41,
                        53,
                        61,
                        64,
                        67,
                        97,
                        101,
                        kTile - 1,
                        kTile,
                        kTile + 1,
                        131,
                        191,
                        2 * kTile - 1,
                        2 * kTile,
                        2 * kTile + 1,
                        277,
                        3 * kTile + 1});
}

/// The attended set: branches, causality, the order's scope, documents.
void draw_pattern(Rng& r, PlanSpec& p) {
  Order& order = p.order;
  const Grid grid = ref::grid_of(order, p.length);
  p.dilation_mode = static_cast<DilationMode>(r.pick({0, 0, 0, 1, 2, 3}));
  const Index branches = r.pick<Index>({1, 1, 1, 1, 2, 2, 3});
  p.pattern.clear();
  for (Index i = 0; i < branches; ++i) {
    Kind kind = Kind::segment;
    if (r.chance(p.dilation_mode == DilationMode::all_queries ? 65 : 15)) kind = static_cast<Kind>(r.below(11));
    if (!fits(kind, order, grid, p.length)) kind = Kind::slide;
    p.pattern.push_back(draw_branch(r, kind, p.length, grid));
    p.pattern.back().joined = i > 0 && r.chance(45);
  }
  p.causality = static_cast<Causality>(r.pick({0, 0, 0, 0, 1, 1, 1, 1, 2}));
  const bool one_segment_size = std::all_of(p.pattern.begin(), p.pattern.end(), [&](const Branch& b) {
    return b.kind == Kind::segment && b.size == p.pattern[0].size;
  });
  order.scope =
      r.pick({Scope::global, Scope::global, Scope::global, Scope::chunked, Scope::order_only, Scope::per_segment});
  if (order.scope == Scope::per_segment && !one_segment_size) order.scope = Scope::global;
  if (order.scope == Scope::order_only && p.causality == Causality::curve) p.causality = Causality::token;
  if (order.scope == Scope::chunked) order.chunk = draw_size(r, p.length);
  if (r.chance(15)) draw_documents(r, p);
}

/// How the operands lie, what they share, and the options of the call.
void draw_operands(Rng& r, Config& c) {
  for (Layout& l : c.layout)
    if (r.chance(45)) l = static_cast<Layout>(r.below(7));
  for (std::size_t i = 0; i < 3; ++i)
    if (c.layout[i] == Layout::all_expanded)
      c.layout[i] = Layout::batch_expanded;  // equal rows teach little; d_o of a sum is one
  if (r.chance(20)) c.alias = static_cast<Alias>(1 + r.below(3));
  if (c.alias == Alias::all_one || c.alias == Alias::packed) c.kv_heads = c.spec.heads;
  if (r.chance(16)) c.logits = r.pick({Logits::wide, Logits::shifted});
  if (r.chance(14)) c.bad = static_cast<Bad>(1 + r.below(3));
  if (c.bad == Bad::none && r.chance(12)) c.dropout = r.pick({0.1, 0.5, 0.9});
  if (r.chance(15)) c.scale = r.pick({1.0, 0.25, 2.0, -0.5, 0.0});
  if (r.chance(15)) c.watched = static_cast<unsigned>(1 + r.below(6));
}

Config draw(Rng& r) {
  Config c;
  PlanSpec& p = c.spec;
  Order& order = p.order;
  order.kind = static_cast<Order::Kind>(r.pick({0, 1, 2, 3, 4, 4, 4, 4}));
  if (order.kind == Order::Kind::tiles)
    order.tile_height = r.pick<Index>({1, 2, 3, 4, 8}), order.tile_width = r.pick<Index>({1, 2, 3, 4, 16});
  if (order.kind == Order::Kind::hilbert && r.chance(15)) order.steps = Steps::unit;
  p.length = draw_length(r, order);
  draw_pattern(r, p);
  if (r.chance(20)) draw_prefix(r, p);

  p.heads = r.pick<Index>({1, 1, 1, 2, 3, 4, 5, 7});
  if (p.dilation_mode == DilationMode::head_groups) p.heads = std::max<Index>(p.heads, std::ssize(p.pattern));
  c.kv_heads = p.heads;
  if (r.chance(40)) do
      c.kv_heads = 1 + r.below(p.heads);
    while (p.heads % c.kv_heads != 0);
  c.batch = r.pick<Index>({0, 1, 1, 1, 1, 1, 2, 3, 3});
  c.dim = r.pick<Index>({1, 3, 8, 16, 20, 64, 96, 128, 32, 5});
  c.dtype = r.pick({DType::f64, DType::f64, DType::f64, DType::f32, DType::f32, DType::bf16, DType::f16});
  draw_operands(r, c);
  if (r.chance(40)) draw_terms(r, c);
  if (r.chance(20) && (c.alias == Alias::none || c.alias == Alias::k_is_v)) draw_queries(r, c);
  return c;
}

/// Any order at all, of sets that are defined along one.
void draw_given(Rng& r, Config& c) {
  PlanSpec& p = c.spec;
  const bool planar = c.table.size() > 1 && p.documents.empty() && c.points == 0;
  if (planar || prefix_in(p) > 0 || p.order.scope == Scope::order_only ||
      std::ranges::any_of(p.pattern, &Branch::on_grid))
    return;
  p.order = Order{.kind = Order::Kind::given};
  p.given = query_run(0, p.length);
  const auto shuffle = [&](Index begin, Index end) {
    for (Index i = end - 1; i > begin; --i) std::swap(p.given[at(i)], p.given[at(begin + r.below(i - begin + 1))]);
  };
  Index first = 0;
  for (const DocumentList& list : p.documents)
    for (const Document& d : list) shuffle(first, first + d.length), first += d.length;
  shuffle(first, p.length);
  c.by_call = r.chance(80), c.each_row = r.chance(50), c.wide = r.chance(50);
}

Config generate(std::uint64_t seed) {
  Rng r(seed);
  // Most are small; one in eleven is about as long as a tile or several, whatever else it must do
  // without.
  const bool is_long = r.chance(9);
  const double budget = is_long ? 1.5e6 : r.pick({3e4, 3e4, 6e4, 6e4, 6e4, 1e5, 1e5, 1e5, 2e5, 1e6});
  Config c;
  do c = draw(r);
  while (work_of(c) > budget || (is_long && c.spec.length < kTile - 1));
  c.seed = seed;
  if (Rng more(seed ^ 0x2545F4914F6CDD1Du); !c.table.empty() && prefix_in(c.spec) == 0 && more.chance(40)) {
    c.points = more.chance(50) ? 1 : 2;
    c.table.resize(1, 1);
    for (Index axes = more.below(3); axes > 0; --axes) c.table.push_back(1 + 2 * more.below(4));
  }
  if (Rng more(seed ^ 0x61C8864680B583EBu); more.chance(15)) draw_given(more, c);
  if (device_under_test().is_cuda() && c.dtype == DType::f64) c.dtype = DType::f32;
  return c;
}

// ---- operands -----------------------------------------------------------------------------------

double rounded(DType type, double x) {
  switch (type) {
    case DType::f32: return static_cast<float>(x);
    case DType::bf16: return static_cast<float>(bf16(static_cast<float>(x)));
    case DType::f16: return static_cast<float>(f16(static_cast<float>(x)));
    default: return x;
  }
}

/// Memory of ours under a tensor, with NaN around the elements and a copy to compare with
/// afterwards.
struct Operand {
  Tensor tensor;
  std::shared_ptr<std::vector<std::byte>> memory;
  Tensor block;  // the same bytes on the device under test, if that is a GPU
  std::vector<std::byte> before;
  bool untouched() const {
    if (!block) return *memory == before;
    const std::vector<std::uint8_t> now = block.to_vector<std::uint8_t>();
    return std::memcmp(now.data(), before.data(), before.size()) == 0;
  }
};

template <class T> void write(std::byte* to, double x) {
  T value;
  if constexpr (sizeof(T) == 2) value = T(static_cast<float>(x));
  else value = static_cast<T>(x);
  std::memcpy(to, &value, sizeof value);
}

/// values: dense [.., .., .., ..] of 4 axes, or 5 of a packed operand.
Operand place(const std::vector<double>& values, const Shape& shape, DType dtype, Layout layout) {
  constexpr Index kGuard = 1024;  // elements
  const int rank = shape.rank(), dim = rank - 1;
  std::array<Index, 6> pitch{};  // extents of the memory, by axis
  for (int a = 0; a < rank; ++a) pitch[at(a)] = std::max<Index>(shape[a], 1);
  std::vector<int> from_inside;  // axes, the innermost first
  for (int a = rank - 1; a >= 0; --a) from_inside.push_back(a);
  Index features_apart = 1;
  if (layout == Layout::padded_heads) pitch[at(dim)] += 3;
  if (layout == Layout::every_other_token) pitch[1] *= 2;
  if (layout == Layout::every_other_feature) features_apart = 2;
  if (layout == Layout::heads_first && rank == 4) std::swap(from_inside[1], from_inside[2]);
  Strides strides{};
  Index step = features_apart;
  for (const int a : from_inside) {
    strides[at(a)] = step;
    step *= pitch[at(a)];
  }
  if (layout == Layout::every_other_token) strides[1] *= 2;
  if (layout == Layout::batch_expanded) strides[0] = 0;
  if (layout == Layout::all_expanded) strides = {};
  const Index extent = kGuard + step * 2 + kGuard, offset = kGuard + (layout == Layout::dense ? 0 : 1);
  const std::size_t size = size_of(dtype);
  Operand out;
  out.memory =
      std::make_shared<std::vector<std::byte>>(at(extent) * size, std::byte{0xff});  // a NaN in every float type
  std::byte* const base = out.memory->data() + at(offset) * size;
  std::array<Index, 6> i{};
  for (const double x : values) {
    Index where = 0;
    for (int a = 0; a < rank; ++a) where += i[at(a)] * strides[at(a)];
    std::byte* const to = base + at(where) * size;
    switch (dtype) {
      case DType::f64: write<double>(to, x); break;
      case DType::f32: write<float>(to, x); break;
      case DType::bf16: write<bf16>(to, x); break;
      default: write<f16>(to, x); break;
    }
    for (int a = rank - 1; a >= 0 && ++i[at(a)] == shape[a]; --a) i[at(a)] = 0;
  }
  out.before = *out.memory;
  Storage storage = Storage::borrow(out.memory->data(), out.memory->size(), {}, [keep = out.memory] {});
  if (device_under_test().is_cuda()) {
    out.block = moved(Tensor(storage, {static_cast<Index>(out.memory->size())}, DType::u8), device_under_test());
    storage = out.block.storage();
  }
  out.tensor = Tensor(storage, shape, strides, offset, dtype);
  return out;
}

/// Tensors of these sizes, full of NaN, given back to the pool: the next ones of such a size start
/// from that.
void poison_pool(std::initializer_list<Index> elements) {
  std::vector<Tensor> dirty;
  for (const Index n : elements)
    for (const DType type : {DType::f64, DType::f32, DType::f16})
      for (int copies = 0; copies < 2; ++copies)
        dirty.push_back(full({n}, std::numeric_limits<double>::quiet_NaN(), type, device_under_test()));
}

// ---- the judge ----------------------------------------------------------------------------------

/// The worst of something, and where.
struct Worst {
  double value = 0;
  std::uint64_t seed = 0;
  void see(double x, std::uint64_t s) {
    if (x > value) value = x, seed = s;
  }
  void see(const Worst& other) { see(other.value, other.seed); }
};

struct Report {
  std::map<std::string, Index> count;
  std::map<std::string, Worst> worst;     // error as a share of what is allowed, by dtype, mode and tensor
  std::map<std::string, Worst> relative;  // f64: error relative to the tensor's scale
  std::map<std::string, double> seconds;
  void add(const Report& other) {
    for (const auto& [key, n] : other.count) count[key] += n;
    for (const auto& [key, w] : other.worst) worst[key].see(w);
    for (const auto& [key, w] : other.relative) relative[key].see(w);
    for (const auto& [key, s] : other.seconds) seconds[key] += s;
  }
};

/// A failed judgement: what, in a word that groups failures, and the details.
struct Failure {
  std::string what, details;
};

template <class... Parts> [[noreturn]] void wrong(const std::string& what, const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  throw Failure{what, s.str()};
}

class Clock {
 public:
  Clock(Report& report, const char* what) : seconds_(report.seconds[what]), start_(std::chrono::steady_clock::now()) {}
  ~Clock() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

/// Output and gradients of one run; dq also holds an aliased or packed input's whole gradient.
struct Values {
  std::vector<double> o, dq, dk, dv;
  std::array<std::vector<double>, 4> terms = {};  // gradients, by kTerms
  bool operator==(const Values&) const = default;
};

template <class T> Values values_from(const ref::Output<T>& out, const ref::Slopes<T>& g) {
  const auto wide = [](const std::vector<T>& x) { return std::vector<double>(x.begin(), x.end()); };
  return {
      wide(out.o), wide(g.dq), wide(g.dk), wide(g.dv), {wide(g.dslopes), wide(g.dtable), wide(g.dbias), wide(g.dsink)}};
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) {
           return (std::isnan(x) && std::isnan(y)) ||
                  std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
         });
}

std::vector<double> sum_of(std::vector<double> a, const std::vector<double>& b, DType type) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = rounded(type, a[i] + b[i]);
  return a;
}

/// Three tensors [B, L, H, D] as one [B, L, 3, H, D].
std::vector<double> packed_of(const Values& g, Index rows, Index width) {
  std::vector<double> out;
  for (Index i = 0; i < rows; ++i)
    for (const auto* x : {&g.dq, &g.dk, &g.dv})
      out.insert(out.end(), x->begin() + i * width, x->begin() + (i + 1) * width);
  return out;
}

/// Folds dq, dk, dv together the way the inputs are one.
void fold_aliases(Values& g, const Config& c, DType type) {
  if (g.dq.empty()) return;  // batch 0, or no naive values
  if (c.alias == Alias::k_is_v) g.dk = sum_of(g.dk, g.dv, type), g.dv.clear();
  if (c.alias == Alias::all_one) g.dq = sum_of(sum_of(g.dq, g.dk, type), g.dv, type), g.dk.clear(), g.dv.clear();
  if (c.alias == Alias::packed)
    g.dq = packed_of(g, c.batch * c.spec.length, c.spec.heads * c.dim), g.dk.clear(), g.dv.clear();
}

/// What rounding alone may cost in the formulas of ops/hilbert/modes. Every term of a sum has
/// the relative errors of its factors. A score is a sum of D products, scaled, minus a maximum or
/// lse: its absolute error is the relative error of its exponential. A sum of n terms errs like
/// sqrt(n); twice that is allowed. Stored in 16 bits: the output, and P, dS and O on the way; an
/// op-by-op mode also stores the scores.
struct Floors {
  double o, dq, dk, dv, lse;
  std::array<double, 4> terms;
};
Floors floors(const Config& c, const ref::Magnitudes& a, bool op_by_op) {
  const double u = 0x1p-24;
  const double s = c.dtype == DType::bf16 ? 0x1p-8 : c.dtype == DType::f16 ? 0x1p-11 : 0;
  const double tiny = c.dtype == DType::f16 ? 0x1p-24 : 0;  // its subnormals are that far apart
  const auto root = [](Index n) { return std::sqrt(static_cast<double>(n)); };
  const double weight = c.dtype == DType::bf16 ? 2.8e-6 : 0;  // of e^x, whose weights become bf16 on a CPU
  const double score = u * (2 * root(c.dim) + 4) * a.score + u * a.lse + weight;
  const double p = 2 * score + u * (8 + 2 * root(a.keys)) + (op_by_op ? 2 * s * a.score : 0);
  const double slope = 2 * p + u * (8 + 4 * root(c.dim)) + 3 * s;
  const double sums = slope + u * 2 * root(a.keys * c.spec.length * std::max<Index>(c.batch, 1)) + s;
  return {a.o * (p + u * (2 + 2 * root(a.keys)) + 2 * s) + tiny,
          a.dq * (slope + u * 2 * root(a.keys)) + tiny,
          a.dk * (slope + u * 2 * root(a.queries)) + tiny,
          a.dv * (p + u * (2 + 2 * root(a.queries)) + 2 * s) + tiny,
          score + u * (8 + 2 * root(a.keys)) + 2 * u * a.lse,
          {a.dslopes * sums + tiny, a.dtable * sums + tiny, a.dbias * sums + tiny, a.dsink * sums + tiny}};
}

/// The queries among an axis of all tokens: `outer` times so many runs of `each` values.
std::vector<double> asking(const PlanSpec& p, const std::vector<double>& x, Index outer, Index each) {
  if (!p.queries || x.empty()) return x;
  std::vector<double> out;
  for (Index i = 0; i < outer; ++i)
    for (const std::int32_t row : *p.queries) {
      const auto from = x.begin() + (i * p.length + row) * each;
      out.insert(out.end(), from, from + each);
    }
  return out;
}
/// Zero where no token asks.
void silence(const PlanSpec& p, std::vector<double>& x, Index outer, Index each) {
  for (Index i = 0; p.queries && i < outer; ++i)
    for (Index t = 0; t < p.length; ++t)
      if (!std::ranges::binary_search(*p.queries, t)) std::fill_n(x.begin() + (i * p.length + t) * each, each, 0.0);
}
Index rows_of_q(const PlanSpec& p) { return p.queries ? std::ssize(*p.queries) : p.length; }

struct Case {
  const Config& c;
  Report& report;
  std::vector<Operand> inputs = {};  // q, k, v as given: fewer when aliased; one when packed
  Operand d_o = {};
  std::vector<Operand> others = {};  // terms, and d_lse
  PlanPtr plan = {};
  AttentionOptions options = {};
  Tensor d_lse = {};  // none: o alone is differentiated
  Index batch = c.batch;

  Tensor other(const std::vector<double>& x, const Shape& shape, DType type) {
    constexpr Layout kTurns[] = {Layout::dense, Layout::padded_heads, Layout::every_other_feature};
    const Layout layout = device_under_test().is_cpu() ? kTurns[c.seed % 3] : Layout::dense;
    return others.emplace_back(place(x, shape, type, layout)).tensor;
  }

  /// Those that are inputs, by kTerms.
  std::array<Tensor, 4> terms() const {
    const ScoreTerms& x = options.terms;
    return {x.slopes, x.relative, x.bias, x.sink};
  }

  /// Tensors in the roles of q, k, v.
  std::array<Tensor, 3> roles() const {
    const Tensor& first = inputs[0].tensor;
    if (c.alias == Alias::all_one) return {first, first, first};
    if (c.alias == Alias::k_is_v) return {first, inputs[1].tensor, inputs[1].tensor};
    return {first, inputs[1].tensor, inputs[2].tensor};
  }
  Tensor call(const AttentionOptions& how) const {
    if (c.alias == Alias::packed) return attention(inputs[0].tensor, plan, how);
    const auto [q, k, v] = roles();
    return attention(q, k, v, plan, how);
  }
  bool is_watched(std::size_t input) const { return inputs.size() < 3 || (c.watched >> input & 1) != 0; }

  Values run(Backward mode) const {
    const PlanSpec& p = c.spec;
    poison_pool(
        {batch * p.length * p.heads * c.dim, batch * p.length * c.kv_heads * c.dim, batch * p.heads * p.length});
    AttentionOptions how = options;
    how.backward = mode;
    Tape tape;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (is_watched(i)) tape.watch(inputs[i].tensor);
    for (const Tensor& x : terms())
      if (x) tape.watch(x);
    AttentionResult r;
    if (d_lse) {
      const auto [q, k, v] = roles();
      r = attention_with_lse(q, k, v, plan, how);
    }
    const Tensor o = d_lse ? r.o : call(how);
    if (o.dtype() != c.dtype) wrong("type", "o is ", o.dtype());
    if (o.shape() != Shape{batch, rows_of_q(p), p.heads, c.dim}) wrong("shape", "o is ", o.shape());
    Values out{o.to_vector(), {}, {}, {}, {}};
    const auto wide = [&](const Tensor& x) { return to(x, d_lse.dtype()); };
    const auto both = [&](const Tensor& y, const Tensor& lse) {
      return cat({wide(y), unsqueeze(permute(lse, {0, 2, 1}), -1)}, -1);
    };
    const Gradients g = d_lse ? tape.backward(both(o, r.lse), both(d_o.tensor, d_lse)) : tape.backward(o, d_o.tensor);
    for (std::size_t i = 0; i < 4; ++i) {
      const Tensor x = terms()[i];
      if (!x) continue;
      if (!g.has(x)) wrong("no gradient", "of ", kTerms[i]);
      if (g[x].shape() != x.shape() || g[x].dtype() != x.dtype())
        wrong("shape", "gradient of ", kTerms[i], " is ", g[x].shape(), ' ', g[x].dtype());
      out.terms[i] = g[x].to_vector();
    }
    std::vector<double>* const into[] = {&out.dq, &out.dk, &out.dv};
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& x = inputs[i].tensor;
      if (!is_watched(i)) {
        if (g.has(x)) wrong("unwatched", "input ", i, " has a gradient");
        continue;
      }
      if (!g.has(x)) wrong("no gradient", "of input ", i);
      if (g[x].shape() != x.shape() || g[x].dtype() != x.dtype())
        wrong("shape", "gradient ", i, " is ", g[x].shape(), ' ', g[x].dtype());
      *into[i] = g[x].to_vector();
    }
    for (const Operand& x : inputs)
      if (!x.untouched()) wrong("inputs", "an input or its surroundings changed");
    if (!d_o.untouched()) wrong("inputs", "d_o or its surroundings changed");
    for (const Operand& x : others)
      if (!x.untouched()) wrong("inputs", "a term, d_lse or their surroundings changed");
    return out;
  }

  /// |got - want| at most what is allowed, NaN exactly where it belongs. allowed < 0: the f64 rule,
  /// of scale.
  void compare(const std::string& which, const std::vector<double>& got, const std::vector<double>& want,
               double allowed, double scale) const {
    if (got.size() != want.size()) wrong("size", which, ": ", got.size(), " of ", want.size());
    double worst = 0;
    std::size_t where = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(want[i]) != std::isnan(got[i]))
        wrong("NaN", which, '[', i, "] is ", got[i], ", reference ", want[i]);
      if (got[i] == want[i] || std::isnan(want[i])) continue;  // the infinities too
      // Beyond what f16 holds, infinity is the nearest.
      if (c.dtype == DType::f16 && std::abs(want[i]) + allowed >= 65520 && got[i] == std::copysign(INFINITY, want[i]))
        continue;
      const double error = std::abs(got[i] - want[i]);
      if (!(error <= worst)) worst = error, where = i;
    }
    if (c.dtype == DType::f64 && scale > 0) report.relative[which].see(worst / scale, c.seed);
    if (worst > 0) report.worst[which].see(allowed > 0 ? worst / allowed : 1e300, c.seed);
    if (worst > allowed)
      wrong("values", which, '[', where, "] is ", std::setprecision(17), got[where], ", reference ", want[where],
            "; error ", std::setprecision(3), worst, " of ", allowed, " allowed");
  }
};

double largest_error(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::isfinite(a[i]) && std::isfinite(b[i])) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

/// The terms, for the library and for the reference.
ref::Terms<double> make_terms(Rng& r, const Config& c, Case& test) {
  const DType stat = c.stat();
  ScoreTerms& to = test.options.terms;
  ref::Terms<double> out;
  const auto drawn = [&](const Shape& shape, double sigma, DType type) {
    std::vector<double> x(at(shape.numel()));
    for (double& e : x) e = rounded(type, sigma * r.normal());
    return x;
  };
  const Index heads = c.spec.heads;
  out.grid = ref::grid_of(c.spec.order, behind(c.spec)), out.prefix = prefix_in(c.spec);
  if (!c.spec.documents.empty()) out.documents = c.spec.documents[0];
  if ((out.softcap = c.softcap) > 0) to.softcap = c.softcap;
  if (c.alibi == Alibi::published) to.alibi = true, out.slopes = alibi_slopes(heads, stat).to_vector();
  if (c.alibi == Alibi::learned) to.slopes = test.other(out.slopes = drawn({heads}, 0.2, stat), {heads}, stat);
  out.distance_on_grid = std::any_of(c.spec.pattern.begin(), c.spec.pattern.end(), [](const Branch& b) {
    return b.kind >= Kind::window2d && b.kind <= Kind::neighborhood3d;
  });
  if (!(out.table_shape = c.table).empty()) {
    Shape shape = heads;
    for (const Index extent : c.table) shape.push_back(extent);
    to.relative = test.other(out.table = drawn(shape, 1, stat), shape, stat);
  }
  if (c.points > 0 && !c.table.empty()) {  // some of them far beyond the table's reach, and beyond 16 bits
    Rng where(c.seed ^ 0x9E6C63D0876A9A35u);
    const auto axes = static_cast<Index>(c.table.size()), rows = c.points == 1 ? 1 : c.batch;
    std::vector<std::int32_t> x(at(rows * c.spec.length * axes));
    for (std::int32_t& coordinate : x)
      coordinate = static_cast<std::int32_t>(where.chance(5) ? where.below(200001) - 100000 : where.below(9) - 4);
    to.points = from_values(x, c.points == 1 ? Shape{c.spec.length, axes} : Shape{rows, c.spec.length, axes});
    to.points = moved(to.points, device_under_test());
    out.length = c.spec.length;
    for (Index b = 0; b < c.batch; ++b) {
      const auto row = x.begin() + (rows == 1 ? 0 : b) * c.spec.length * axes;
      out.points.insert(out.points.end(), row, row + c.spec.length * axes);
    }
  }
  out.bias_shape = {1, 1, 1, 1};
  if (c.bias >= 0) {
    const DType type = c.narrow_bias ? c.dtype : stat;
    const Shape shape = c.bias_shape();
    out.bias = drawn(shape, 1, type);
    std::copy(shape.begin(), shape.end(), out.bias_shape.begin());
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    for (double& x : out.bias)
      if (c.mask == Mask::pairs && r.chance(20)) x = -kInfinity;
    if (c.mask == Mask::row && !out.bias.empty()) {
      const Index keys = shape[3], row = r.below(shape.numel() / keys);
      std::fill_n(out.bias.begin() + row * keys, keys, -kInfinity);
    }
    Shape given = shape;
    std::vector<double> rows = out.bias;
    if (c.bias >> 2 & 1)
      given = shape.with(2, rows_of_q(c.spec)), rows = asking(c.spec, rows, shape[0] * shape[1], shape[3]);
    to.bias = test.other(rows, given, type);
    if (c.turned_bias) to.bias = transpose(contiguous(transpose(to.bias)));
  }
  if (c.sink) to.sink = test.other(out.sink = drawn({heads}, 2, stat), {heads}, stat);
  return out;
}

/// Dense values for one operand.
std::vector<double> values_of(Rng& r, const Config& c, Index heads, double sigma, Layout layout, bool round = true) {
  const Index row = c.spec.length * heads * c.dim;
  std::vector<double> x(at(c.batch * row));
  for (double& e : x) e = sigma * r.normal();
  if (layout == Layout::batch_expanded)
    for (Index b = 1; b < c.batch; ++b) std::copy_n(x.begin(), row, x.begin() + b * row);
  if (layout == Layout::all_expanded && !x.empty()) std::fill(x.begin(), x.end(), x[0]);
  if (round)
    for (double& e : x) e = rounded(c.dtype, e);
  return x;
}

/// Judges one configuration, a phase a function. All draw from one generator: their order is part
/// of what a seed means.
class Judge {
 public:
  Judge(const Config& c, Report& report)
      : c_(c), p_(c.spec), report_(report), r_(c.seed ^ 0x5DEECE66Du), test_{c, report} {}
  void run() {
    judge_plan();
    draw_values();
    if (c_.bad != Bad::none && c_.batch > 0) spoil_values();
    place_values();
    compute_reference();
    run_modes();
    for (std::size_t mode = 0; mode < 3; ++mode) compare_mode(mode);
    if (!same_bits(got_[1].o, got_[2].o)) wrong("bits", "o of hybrid and fused differ");
    run_again();
    run_alone();
    if (c_.alias != Alias::packed) judge_lse();
    tally_pattern();
    tally_call();
  }

 private:
  void tally(const std::string& what) { ++report_.count[what]; }
  std::vector<double> rows_of_queries(const std::vector<double>& x) const {
    return asking(p_, x, c_.batch, p_.heads * c_.dim);
  }
  bool has_expanded_batch() const { return std::ranges::find(c_.layout, Layout::batch_expanded) != c_.layout.end(); }

  /// Makes the plan and the attended set, and holds one against the other.
  void judge_plan() {
    {
      const Clock clock(report_, "plan");
      PlanSpec said = p_;
      if (c_.silent) said.queries.reset();
      test_.plan = plan_of_queries(make_plan(said), rows_of_q(p_));
    }
    {
      const Clock clock(report_, "attended set");
      Order order = p_.order;
      if (order.scope == Scope::per_segment) order.scope = Scope::chunked, order.chunk = p_.pattern[0].size;
      if (p_.documents.empty()) pi_ = ref::order_of(p_, order, 0, behind(p_)), set_.emplace(p_, pi_);
      else set_.emplace(ref::Attended::packed(p_, p_.documents[0]));
      if (p_.queries) set_.emplace(set_->asked_by(*p_.queries));
    }
    const Clock clock(report_, "judging the plan");
    const ref::PlanFault fault = ref::judge(*test_.plan, *set_);
    if (!fault.what.empty()) wrong(fault.what, fault.details);
    attends_ = test_.plan->stats().pairs > 0;
    if (c_.by_call) bring_order();
  }

  /// The order is the call's now, and the plan one of any order.
  void bring_order() {
    PlanSpec any = test_.plan->spec();
    any.given.clear();
    if (c_.silent) any.queries.reset();
    test_.plan = make_plan(any);
    const Tensor one = from_values(p_.given, {p_.length}, c_.wide ? DType::i64 : DType::i32);
    test_.options.permutation =
        moved(c_.each_row ? contiguous(expand(one, {c_.batch, p_.length})) : one, device_under_test());
  }

  /// Scores have a standard deviation of 1.5, or of 4e3, and a row's may sit around +-1e4.
  void draw_values() {
    scale_ = c_.scale.value_or(1 / std::sqrt(static_cast<double>(c_.dim)));
    const double size = scale_ == 0 ? 1 : std::abs(scale_) * std::sqrt(static_cast<double>(c_.dim));
    const double sigma = std::sqrt((c_.logits == Logits::wide ? 4e3 : 1.5) / size);
    in_ = {values_of(r_, c_, p_.heads, sigma, c_.layout[0]), values_of(r_, c_, c_.kv_heads, sigma, c_.layout[1]),
           values_of(r_, c_, c_.kv_heads, 1, c_.layout[2])};
    d_o_ = values_of(r_, c_, p_.heads, 1, c_.layout[3]);
    if (c_.logits != Logits::shifted || scale_ == 0) return;
    const double shift = std::sqrt(1e4 / std::abs(scale_));
    for (std::size_t i = 0; i < in_.q.size(); i += at(c_.dim))
      in_.q[i] = rounded(c_.dtype, (has_expanded_batch() || r_.chance(50) ? shift : -shift));
    for (std::size_t i = 0; i < in_.k.size(); i += at(c_.dim)) in_.k[i] = rounded(c_.dtype, shift);
  }

  /// Fills a row with NaN. A key is the one that fewest queries see: the others must not notice.
  /// One that no query sees may even be infinite.
  void spoil_values() {
    const bool expanded = has_expanded_batch();
    const Index b = expanded ? 0 : r_.below(c_.batch), last = expanded ? c_.batch : b + 1;
    Index row = r_.below(p_.length), fewest = std::numeric_limits<Index>::max();
    if (c_.bad == Bad::key)
      for (Index i = 0, u = row; i < p_.length; ++i, u = (u + 1) % p_.length) {
        Index seen = 0;
        for (Index h = 0; h < p_.heads; ++h)
          for (Index t = 0; t < p_.length; ++t) seen += set_->times(h, t, u);
        if (seen < fewest) fewest = seen, row = u;
      }
    const double value = fewest == 0 && c_.alias != Alias::all_one && r_.chance(50)
                             ? std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::quiet_NaN();
    const auto spoil = [&](std::vector<double>& x, Index heads) {
      for (Index batch = b; batch < last; ++batch)
        std::fill_n(x.begin() + (batch * p_.length + row) * heads * c_.dim, heads * c_.dim, value);
    };
    if (c_.bad == Bad::key) spoil(in_.k, c_.kv_heads), spoil(in_.v, c_.kv_heads);
    if (c_.bad == Bad::query) spoil(in_.q, p_.heads);
    if (c_.bad == Bad::cotangent && c_.layout[3] != Layout::all_expanded) spoil(d_o_, p_.heads);
    if (c_.bad == Bad::key && fewest < p_.length * p_.heads) tally("NaN in a key masked somewhere");
    if (c_.bad == Bad::key && fewest == 0) tally("NaN or Inf in a key masked everywhere");
  }

  /// Operands in memory, laid out and shared as the configuration says; terms, d_lse and options.
  void place_values() {
    if (c_.alias == Alias::k_is_v) in_.v = in_.k;
    if (c_.alias == Alias::all_one) in_.k = in_.v = in_.q;
    const Shape q_shape{c_.batch, rows_of_q(p_), p_.heads, c_.dim}, k_shape{c_.batch, p_.length, c_.kv_heads, c_.dim};
    silence(p_, d_o_, c_.batch, p_.heads * c_.dim);
    test_.d_o = place(rows_of_queries(d_o_), q_shape, c_.dtype, c_.layout[3]);
    if (c_.has_terms()) in_.terms = make_terms(r_, c_, test_);
    if (c_.d_lse) {
      d_lse_.resize(at(c_.batch * p_.heads * p_.length));
      for (double& x : d_lse_) x = rounded(c_.stat(), r_.normal());
      silence(p_, d_lse_, c_.batch * p_.heads, 1);
      const std::vector<double> rows = asking(p_, d_lse_, c_.batch * p_.heads, 1);
      test_.d_lse = test_.other(rows, {c_.batch, p_.heads, rows_of_q(p_)}, c_.stat());
    }
    if (c_.alias == Alias::packed) {
      const Layout layout = c_.layout[0] == Layout::batch_expanded ? Layout::dense : c_.layout[0];
      test_.inputs.push_back(place(packed_of({{}, in_.q, in_.k, in_.v}, c_.batch * p_.length, p_.heads * c_.dim),
                                   {c_.batch, p_.length, 3, p_.heads, c_.dim}, c_.dtype, layout));
    } else {
      test_.inputs.push_back(place(rows_of_queries(in_.q), q_shape, c_.dtype, c_.layout[0]));
      if (c_.alias != Alias::all_one) test_.inputs.push_back(place(in_.k, k_shape, c_.dtype, c_.layout[1]));
      if (c_.alias == Alias::none) test_.inputs.push_back(place(in_.v, k_shape, c_.dtype, c_.layout[2]));
    }
    test_.options.scale = c_.scale;
    test_.options.dropout = c_.dropout;
    if (c_.dropout > 0) test_.options.key = RandomKey{c_.seed, c_.seed << 32 | 7};
  }

  /// The reference, in f64 and naively in the type itself.
  void compute_reference() {
    const ref::Sizes sizes{c_.batch, p_.length, p_.heads,   c_.kv_heads,
                           c_.dim,   scale_,    c_.dropout, test_.options.key.value_or(RandomKey{})};
    {
      const Clock clock(report_, "reference");
      const auto out = ref::attention<double>(sizes, *set_, in_);
      const auto slopes = ref::attention_gradients<double>(sizes, *set_, in_, d_o_, {}, d_lse_);
      want_ = values_from(out, slopes);
      lse_ = asking(p_, out.lse, c_.batch * p_.heads, 1);
      magnitude_ = ref::magnitudes(sizes, *set_, in_, d_o_, d_lse_);
      if (c_.dtype == DType::f64 && c_.bad == Bad::none && c_.alias == Alias::none && c_.batch > 0 && r_.chance(25))
        judge_formulas(sizes, slopes);
      if (c_.dtype != DType::f64) naive_ = naive_values(sizes);
    }
    for (Values* x : {&want_, &naive_}) {
      x->o = rows_of_queries(x->o), x->dq = rows_of_queries(x->dq);
      if (c_.bias >= 0 && c_.bias >> 2 & 1)
        x->terms[2] = asking(p_, x->terms[2], c_.bias_shape()[0] * c_.bias_shape()[1], c_.bias_shape()[3]);
    }
    fold_aliases(want_, c_, DType::f64);
    fold_aliases(naive_, c_, c_.dtype);
  }

  /// Gradients by the formulas against dual numbers, along a random direction.
  void judge_formulas(const ref::Sizes& sizes, const ref::Slopes<double>& slopes) {
    const ref::Inputs<double> along{values_of(r_, c_, p_.heads, 1, Layout::dense, false),
                                    values_of(r_, c_, c_.kv_heads, 1, Layout::dense, false),
                                    values_of(r_, c_, c_.kv_heads, 1, Layout::dense, false),
                                    {0, slopes.dslopes, slopes.dtable, slopes.dbias, slopes.dsink}};
    const double by_dual = ref::slope_along(sizes, *set_, in_, along, d_o_, d_lse_);
    double by_formula = 0, terms = 1e-30;
    const auto add = [&](const std::vector<double>& g, const std::vector<double>& x, double bound) {
      for (std::size_t i = 0; i < g.size(); ++i) by_formula += g[i] * x[i], terms += bound * std::abs(x[i]);
    };
    const ref::Magnitudes& a = magnitude_;
    add(slopes.dq, along.q, a.dq), add(slopes.dk, along.k, a.dk), add(slopes.dv, along.v, a.dv),
        add(slopes.dslopes, along.terms.slopes, a.dslopes), add(slopes.dtable, along.terms.table, a.dtable),
        add(slopes.dbias, along.terms.bias, a.dbias), add(slopes.dsink, along.terms.sink, a.dsink);
    const double error = std::abs(by_dual - by_formula);
    report_.relative["reference: formulas against dual numbers"].see(error / terms, c_.seed);
    if (!(error <= 1e-11 * terms)) wrong("dual", by_dual, " by dual numbers, ", by_formula, " by the formulas");
    tally("dual-number checks");
  }

  Values naive_values(const ref::Sizes& sizes) const {
    const auto narrow = [](const std::vector<double>& x) { return std::vector<float>(x.begin(), x.end()); };
    ref::Store store;
    if (c_.dtype == DType::bf16) store = [](float x) { return static_cast<float>(bf16(x)); };
    if (c_.dtype == DType::f16) store = [](float x) { return static_cast<float>(f16(x)); };
    const ref::Terms<double>& x = in_.terms;
    const ref::Inputs<float> in{
        narrow(in_.q),
        narrow(in_.k),
        narrow(in_.v),
        {x.softcap, narrow(x.slopes), narrow(x.table), narrow(x.bias), narrow(x.sink), x.distance_on_grid,
         x.table_shape, x.bias_shape, x.grid, x.documents, x.prefix, x.points, x.length}};
    return values_from(ref::attention<float>(sizes, *set_, in, store),
                       ref::attention_gradients<float>(sizes, *set_, in, narrow(d_o_), store, narrow(d_lse_)));
  }

  void run_modes() {
    clear_attention_fallbacks();
    set_thread_count(static_cast<int>(1 + r_.below(4)));
    for (std::size_t mode = 0; mode < 3; ++mode) {
      const Clock clock(report_, kModes[mode]);
      clear_attention_routes();
      got_[mode] = test_.run(kBackwards[mode]);
    }
    // Fused goes through kernels of the device, forward and backward.
    routes_ = attention_routes();
    for (const AttentionRoute& pass : routes_) {
      if (pass.route.starts_with("cpu") != device_under_test().is_cpu()) wrong("route", pass.pass, " by ", pass.route);
      tally("route " + std::string(pass.route) + (c_.has_terms() ? " with terms" : ""));
    }
    if (attends_ && routes_.size() < 2) wrong("route", "no kernel ran");
    for (const Fallback& f : attention_fallbacks()) tally("fallback: " + f.reason);
  }

  void compare_mode(std::size_t mode) const {
    const Values& got = got_[mode];
    const ref::Magnitudes& a = magnitude_;
    const Floors floor = floors(c_, a, mode == 0);
    const std::string prefix = std::string(name_of(c_.dtype)) + ' ' + kModes[mode] + ' ';
    const auto one = [&](const char* which, const std::vector<double>& g, const std::vector<double>& w,
                         const std::vector<double>& n, double magnitude_of, double floor_of) {
      if (g.empty() && !w.empty()) return;  // not watched
      test_.compare(prefix + which, g, w,
                    c_.dtype == DType::f64 ? 1e-10 * magnitude_of + 1e-300 : 2 * largest_error(n, w) + floor_of,
                    magnitude_of);
    };
    one("o", got.o, want_.o, naive_.o, a.o, floor.o);
    // Taped multiplies masked zeros with every row of d_o of a group: there a NaN spreads, as
    // ops/hilbert/modes/README.md says.
    if (c_.bad == Bad::cotangent && mode == 0) return;
    const bool whole = c_.alias == Alias::all_one || c_.alias == Alias::packed;
    one("dq", got.dq, want_.dq, naive_.dq, whole ? a.dq + a.dk + a.dv : a.dq,
        whole ? floor.dq + floor.dk + floor.dv : floor.dq);
    one("dk", got.dk, want_.dk, naive_.dk, c_.alias == Alias::k_is_v ? a.dk + a.dv : a.dk,
        c_.alias == Alias::k_is_v ? floor.dk + floor.dv : floor.dk);
    one("dv", got.dv, want_.dv, naive_.dv, a.dv, floor.dv);
    const double of_terms[] = {a.dslopes, a.dtable, a.dbias, a.dsink};
    for (std::size_t i = 0; i < 4; ++i)
      one((std::string("d") + kTerms[i]).c_str(), got.terms[i], want_.terms[i], naive_.terms[i], of_terms[i],
          floor.terms[i]);
  }

  /// Fused on another number of threads has the same bits.
  void run_again() {
    const Clock clock(report_, "fused again");
    set_thread_count(static_cast<int>(1 + r_.below(4)));
    const Values again = test_.run(Backward::fused);
    if (!same_bits(again.o, got_[2].o) || !same_bits(again.dq, got_[2].dq) || !same_bits(again.dk, got_[2].dk) ||
        !same_bits(again.dv, got_[2].dv) || !std::ranges::equal(again.terms, got_[2].terms, same_bits))
      wrong("bits", "a second fused run differs");
  }

  /// One sequence by itself has the bits that it has among the others, by the same kernels.
  void run_alone() {
    if (c_.batch < 2) return;
    const Clock clock(report_, "fused alone");
    const Index row = r_.below(c_.batch);
    const auto its = [&](const Tensor& x, int rank) {
      return x && x.rank() == rank && x.dim(0) == c_.batch ? slice(x, 0, row, row + 1) : x;
    };
    clear_attention_routes();
    Case one{c_, report_, test_.inputs, test_.d_o, {}, test_.plan, test_.options, its(test_.d_lse, 3)};
    for (Operand& x : one.inputs) x.tensor = slice(x.tensor, 0, row, row + 1);
    one.d_o.tensor = slice(one.d_o.tensor, 0, row, row + 1);
    one.options.first_batch = row;
    one.options.terms.bias = its(one.options.terms.bias, 4);
    one.options.permutation = its(one.options.permutation, 2);
    one.options.terms.points = its(one.options.terms.points, 3);
    one.batch = 1;
    const Values alone = one.run(Backward::fused);
    if (!std::ranges::equal(attention_routes(), routes_, {}, &AttentionRoute::route, &AttentionRoute::route)) return;
    const auto same = [&](const std::vector<double>& all, const std::vector<double>& its_own) {
      const auto each = all.size() / at(c_.batch), from = each * at(row);
      return same_bits({all.begin() + std::ptrdiff_t(from), all.begin() + std::ptrdiff_t(from + each)}, its_own);
    };
    if (!same(got_[2].o, alone.o) || !same(got_[2].dq, alone.dq) || !same(got_[2].dk, alone.dk) ||
        !same(got_[2].dv, alone.dv))
      wrong("bits", "sequence ", row, " alone differs from itself among ", c_.batch);
    tally("a sequence alone");
  }

  void judge_lse() const {
    const auto [q, k, v] = test_.roles();
    const AttentionResult result = attention_with_lse(q, k, v, test_.plan, test_.options);
    if (!same_bits(result.o.to_vector(), got_[2].o)) wrong("bits", "o of attention_with_lse and fused differ");
    if (result.lse.shape() != Shape{c_.batch, p_.heads, rows_of_q(p_)}) wrong("shape", "lse is ", result.lse.shape());
    if (result.lse.dtype() != c_.stat()) wrong("type", "lse is ", result.lse.dtype());
    const double log_scale = 1 + magnitude_.score + magnitude_.lse;
    test_.compare(std::string(name_of(c_.dtype)) + " lse", result.lse.to_vector(), lse_,
                  c_.dtype == DType::f64 ? 1e-10 * log_scale : floors(c_, magnitude_, false).lse + 0x1p-24, log_scale);
  }

  void tally_pattern() {
    tally(std::string("order ") + name(kOrders, p_.order.kind) + ' ' + name(kScopes, p_.order.scope));
    for (const Branch& b : p_.pattern) {
      tally(std::string("pattern ") + name(kKinds, b.kind));
      for (std::size_t i = 0; i < b.dimensions(); ++i) {
        if (b.axes[i].dilation > 1) tally("an axis is dilated");
        if (b.axes[i].stride > 1) tally("an axis strides");
        if (b.axes[i].causal) tally("an axis is causal");
      }
      if (std::ranges::any_of(b.axes, [](const Branch::Axis& a) { return a.shift > 0; })) tally("shifted");
      if (b.axes[0].borrows) tally("a borrowed tail");
    }
    tally(std::string("dilation mode ") + name(kDilationModes, p_.dilation_mode));
    tally(std::string("causality ") + name(kCausalities, p_.causality));
    if (p_.pattern.size() > 1) tally("several branches");
    if (std::ranges::any_of(p_.pattern, &Branch::joined)) tally("a union");
    if (set_->empty_rows() > 0) tally("rows without keys");
    if (!test_.plan->parts().empty() && test_.plan->parts()[0].tilings.size() > 1) tally("several tilings");
    if (p_.length > kTile) tally("longer than a tile");
    if (!p_.documents.empty()) tally("documents");
    if (p_.queries) tally(c_.silent ? "the last queries" : "queries named");
    if (p_.queries && p_.queries->size() == 1) tally("one query");
    if (c_.by_call) tally(c_.each_row ? "an order for each row, with the call" : "an order with the call");
    if (pi_.independent) tally("order from the second implementation");
  }

  void tally_call() {
    tally(std::string("type ") + std::string(name_of(c_.dtype)));
    if (c_.kv_heads != p_.heads) tally("grouped heads");
    if (c_.batch == 0) tally("batch 0");
    if (c_.dropout > 0) tally("dropout");
    if (c_.softcap > 0) tally("softcap");
    if (c_.alibi != Alibi::none) tally(std::string("alibi ") + name(kAlibis, c_.alibi));
    if (c_.points > 0) tally(c_.points == 1 ? "points" : "points of each row");
    if (!c_.table.empty()) tally("relative on " + std::to_string(c_.table.size()) + " axes");
    if (c_.bias >= 0) tally(std::string("bias that masks ") + name(kMasks, c_.mask));
    if (c_.sink) tally("sink");
    if (c_.d_lse) tally("gradient of lse");
    if (c_.watched != 7) tally("not all inputs watched");
    if (c_.alias != Alias::none) tally(std::string("alias ") + name(kAliases, c_.alias));
    if (c_.logits != Logits::ordinary) tally(std::string("logits ") + name(kLogits, c_.logits));
    if (c_.bad != Bad::none) tally(std::string("NaN: ") + name(kBads, c_.bad));
    if (std::ranges::any_of(c_.layout, [](Layout l) { return l != Layout::dense; })) tally("strided operands");
  }

  const Config& c_;
  const PlanSpec& p_;
  Report& report_;
  Rng r_;
  Case test_;
  ref::Pi pi_;
  std::optional<ref::Attended> set_;
  double scale_ = 0;
  ref::Inputs<double> in_;
  std::vector<double> d_o_, d_lse_;  // of all tokens
  Values want_, naive_;
  std::vector<double> lse_;
  ref::Magnitudes magnitude_;
  std::array<Values, 3> got_;           // by mode
  std::vector<AttentionRoute> routes_;  // of fused
  bool attends_ = false;                // some pair does
};

/// Nothing, or what went wrong.
std::optional<Failure> outcome(const Config& c, Report& report) {
  try {
    Judge(c, report).run();
    return std::nullopt;
  } catch (const Failure& f) { return f; } catch (const Error& e) {
    std::string kind = std::string("error: ") + e.what();  // of one kind whatever the numbers in it
    std::erase_if(kind, [](char ch) { return ch >= '0' && ch <= '9'; });
    return Failure{kind.substr(0, 48), e.what()};
  } catch (const std::exception& e) { return Failure{"exception", e.what()}; }
}

// ---- shrinking ----------------------------------------------------------------------------------

/// Smaller neighbours of a configuration, the boldest cuts first.
class Neighbours {
 public:
  explicit Neighbours(const Config& c) : c_(c), p_(c.spec) {
    cut_tokens();
    cut_sizes();
    cut_branches();
    for (std::size_t i = 0; i < p_.pattern.size(); ++i) simplify_branch(i);
    simplify_order();
    simplify_operands();
  }
  std::vector<Config> list;

 private:
  /// Adds the configuration after a change, made to fit itself again; none where it cannot.
  template <class F> void propose(const F& change) {
    Config s = c_;
    change(s);
    if (fit(s)) list.push_back(std::move(s));
  }
  bool fit(Config& s) const {
    PlanSpec& p = s.spec;
    if (!p.order.folds() && p.length != p_.length) p.order.grid = {}, p.order.steps = Steps::near;
    std::erase_if(p.given, [&](std::int32_t token) { return token >= p.length; });
    for (DocumentList& left : p.documents) {
      std::size_t fit = 0;
      for (Index tokens = 0; fit < left.size() && (tokens += left[fit].length) <= p.length;) ++fit;
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(fit), left.end());
    }
    if (axes_of(p) == 1 && s.table.size() > 1 && s.points == 0) s.table.resize(1);
    if (p.queries && s.silent)
      p.queries = query_run(p.length - std::min(p.length, rows_of_q(p)), std::min(p.length, rows_of_q(p)));
    if (p.queries) std::erase_if(*p.queries, [&](std::int32_t row) { return row >= p.length; });
    const Index cells = behind(p);
    const Grid grid = ref::grid_of(p.order, cells);
    const auto odd = [](Index k, Index n) { return std::min(k, n - 1 + n % 2); };
    for (Branch& b : p.pattern) {
      if (p.documents.empty() && !fits(b.kind, p.order, grid, cells)) return false;
      if (b.kind == Kind::neighborhood && !b.axes[0].causal) b.size = odd(b.size, cells);
      if (b.kind == Kind::neighborhood2d && b.axes == Branch{}.axes)
        b.rows = odd(b.rows, grid.height), b.columns = odd(b.columns, grid.width);
      if (b.kind == Kind::blocks) {
        const Index n = (cells + b.size - 1) / b.size;
        std::erase_if(b.pairs, [&](const auto& pair) { return pair.first >= n || pair.second >= n; });
      }
      b.offset = std::min(b.offset, b.dilation - 1);
    }
    if (p.dilation_mode == DilationMode::head_groups && p.heads < std::ssize(p.pattern))
      p.heads = s.kv_heads = std::ssize(p.pattern);
    if (s.alias == Alias::all_one || s.alias == Alias::packed) s.kv_heads = p.heads;
    return true;
  }

  void cut_tokens() {
    if (p_.length > 1) {
      propose([](Config& s) { s.spec.length /= 2; });
      propose([](Config& s) { s.spec.length -= s.spec.length / 4; });
      propose([](Config& s) { s.spec.length -= 1; });
    }
    if (!p_.documents.empty()) {
      for (std::size_t i = 0; i < p_.documents[0].size(); ++i)
        propose([i](Config& s) {
          s.spec.documents[0].erase(s.spec.documents[0].begin() + static_cast<std::ptrdiff_t>(i));
        });
      propose([](Config& s) { s.spec.documents.clear(); });
    }
    if (p_.queries) {
      propose([](Config& s) { s.spec.queries.reset(), s.silent = false; });
      propose([](Config& s) { s.silent = false; });
      for (std::size_t i = 0; i < p_.queries->size() && !c_.silent; ++i)
        propose([i](Config& s) { s.spec.queries->erase(s.spec.queries->begin() + static_cast<std::ptrdiff_t>(i)); });
    }
  }

  void cut_sizes() {
    if (c_.batch > 1) propose([](Config& s) { s.batch = 1; });
    if (p_.heads > 1) {
      propose([](Config& s) { s.spec.heads = s.kv_heads = 1; });
      propose([](Config& s) { s.spec.heads = s.kv_heads = 2; });
      propose([](Config& s) { s.kv_heads = s.spec.heads; });
      propose([](Config& s) { s.spec.heads -= 1, s.kv_heads = s.spec.heads; });
    }
    if (c_.dim > 1) {
      propose([](Config& s) { s.dim = 1; });
      propose([](Config& s) { s.dim /= 2; });
      propose([](Config& s) { s.dim -= 1; });
    }
  }

  void cut_branches() {
    if (p_.pattern.size() > 1)
      for (std::size_t i = 0; i < p_.pattern.size(); ++i)
        propose([i](Config& s) {
          s.spec.pattern.erase(s.spec.pattern.begin() + static_cast<std::ptrdiff_t>(i));
          s.spec.pattern[0].joined = false;
        });
  }
  void simplify_branch(std::size_t i) {
    const Branch& b = p_.pattern[i];
    const auto change = [&](auto f) { propose([i, f](Config& s) { f(s.spec.pattern[i]); }); };
    if (b.kind != Kind::dense)
      change([](Branch& x) {
        const bool joined = x.joined;
        x = Branch{}, x.joined = joined;
      });
    if (b.joined) change([](Branch& x) { x.joined = false; });
    if (b.axes[0].borrows) change([](Branch& x) { x.axes[0].borrows = false; });
    if (b.dilation > 1) {
      change([](Branch& x) { x.dilation = 1, x.offset = 0, x.offset_by_head = false; });
      change([](Branch& x) { x.dilation = (x.dilation + 1) / 2; });
    }
    for (std::size_t a = 0; a < b.axes.size(); ++a) {
      const Branch::Axis& axis = b.axes[a];
      if (axis.stride > 1) change([a](Branch& x) { x.axes[a].stride = 1; });
      if (axis.shift > 0) change([a](Branch& x) { x.axes[a].shift = 0; });
      if (axis.dilation > 1) change([a](Branch& x) { x.axes[a].dilation = 1; });
    }
    if (b.offset > 0 || b.offset_by_head) change([](Branch& x) { x.offset = 0, x.offset_by_head = false; });
    if (b.kind == Kind::segment && b.size > 1) change([](Branch& x) { x.size /= 2; });
    if (b.kind == Kind::slide && b.size > 0) change([](Branch& x) { x.size /= 2; });
    if (b.kind == Kind::blocks && b.pairs.size() > 1) {
      change([](Branch& x) { x.pairs.resize(x.pairs.size() / 2); });
      change([](Branch& x) {
        x.pairs.erase(x.pairs.begin(), x.pairs.begin() + static_cast<std::ptrdiff_t>(x.pairs.size() / 2));
      });
    }
  }

  void simplify_order() {
    if (prefix_in(p_) > 0)
      propose([](Config& s) {
        PlanSpec& p = s.spec;
        if (p.documents.empty()) p.length = std::max<Index>(1, behind(p));
        for (DocumentList& row : p.documents)
          for (Document& d : row) d.length -= prefix_in(p);
        p.pattern.back().prefix = 0;
      });
    if (p_.causality != Causality::none) propose([](Config& s) { s.spec.causality = Causality::none; });
    if (p_.dilation_mode != DilationMode::all_queries)
      propose([](Config& s) { s.spec.dilation_mode = DilationMode::all_queries; });
    if (p_.order.scope != Scope::global)
      propose([](Config& s) { s.spec.order.scope = Scope::global, s.spec.order.chunk = 0; });
    if (p_.order != Order{})
      propose([](Config& s) { s.spec.order = Order{}, s.spec.given.clear(), s.by_call = false; });
    if (!p_.order.folds()) propose([](Config& s) { s.spec.order.grid = {}, s.spec.order.steps = Steps::near; });
  }

  /// Proposes these as they are when nothing is drawn.
  template <class... T> void reset(T Config::*... fields) {
    static const Config plain;
    const auto one = [&](auto field) {
      if (c_.*field != plain.*field) propose([field](Config& s) { s.*field = plain.*field; });
    };
    (one(fields), ...);
  }
  void simplify_operands() {
    for (std::size_t i = 0; i < 4; ++i)
      if (c_.layout[i] != Layout::dense) propose([i](Config& s) { s.layout[i] = Layout::dense; });
    reset(&Config::by_call, &Config::each_row, &Config::wide);
    reset(&Config::points, &Config::alias, &Config::logits, &Config::bad, &Config::dropout, &Config::softcap,
          &Config::alibi, &Config::table, &Config::bias);
    for (int i = 0; i < 4 && c_.bias > 0; ++i)
      if (c_.bias >> i & 1) propose([i](Config& s) { s.bias &= ~(1 << i); });
    reset(&Config::narrow_bias, &Config::turned_bias, &Config::mask, &Config::sink, &Config::d_lse, &Config::scale,
          &Config::watched, &Config::dtype);
  }

  const Config& c_;
  const PlanSpec& p_;
};

/// The smallest configuration reached that still fails in the same way.
std::pair<Config, Failure> shrunk(Config c, Failure failure) {
  for (int tries = 0; tries < 2000;) {
    bool went_on = false;
    for (Config& s : Neighbours(c).list) {
      ++tries;
      Report ignored;
      const auto f = outcome(s, ignored);
      if (!f || f->what != failure.what) continue;
      c = std::move(s), failure = *f, went_on = true;
      break;
    }
    if (!went_on) break;
  }
  return {c, failure};
}

std::uint64_t setting(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// ---- many ---------------------------------------------------------------------------------------

void replay(std::uint64_t seed) {
  const Config c = generate(seed);
  std::cout << describe(c) << '\n';
  Report report;
  if (const auto failure = outcome(c, report)) {
    std::cout << "FAILS: " << failure->what << ": " << failure->details << '\n';
    const auto [least, why] = shrunk(c, *failure);
    ADD_FAILURE() << "smallest: " << describe(least) << "\n  " << why.what << ": " << why.details;
  }
  for (const auto& [what, w] : report.worst) std::cout << "  " << what << ": " << w.value << " of what is allowed\n";
}

using Failures = std::map<std::string, std::vector<std::pair<std::uint64_t, std::string>>>;  // by what: seeds, details

/// Judges so many on all threads.
std::pair<Report, Failures> judge_all(std::uint64_t first, std::uint64_t count) {
  std::atomic<std::uint64_t> next{first};
  std::mutex mutex;
  Report total;
  Failures failures;
  const auto work = [&] {
    Report mine;
    for (std::uint64_t seed; (seed = next.fetch_add(1)) < first + count;)
      if (const auto failure = outcome(generate(seed), mine)) {
        const std::lock_guard lock(mutex);
        failures[failure->what].emplace_back(seed, failure->details);
      }
    const std::lock_guard lock(mutex);
    total.add(mine);
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  threads.clear();  // joins
  return {std::move(total), std::move(failures)};
}

/// Tells of each sort of failure the seeds and the smallest configuration; how many failed.
std::size_t tell_failures(Failures& failures) {
  std::size_t failed = 0;
  int shown = 0;
  for (auto& [what, list] : failures) {
    failed += list.size();
    if (++shown > 12) continue;
    std::sort(list.begin(), list.end());
    std::cout << what << ": " << list.size() << " failures; seeds";
    for (std::size_t i = 0; i < std::min<std::size_t>(list.size(), 12); ++i) std::cout << ' ' << list[i].first;
    std::cout << "\n  the first: " << list[0].second << '\n';
    const Config c = generate(list[0].first);
    const auto [least, why] = shrunk(c, {what, list[0].second});
    ADD_FAILURE() << what << ": " << list.size() << " configurations; HILT_FUZZ_SEED=" << list[0].first
                  << " replays one\n  drawn:    " << describe(c) << "\n  smallest: " << describe(least) << "\n  "
                  << why.what << ": " << why.details;
  }
  return failed;
}

void tell_report(const Report& total) {
  for (const auto& [what, n] : total.count) std::cout << "  " << std::setw(7) << n << "  " << what << '\n';
  std::cout << "  seconds on all threads:";
  for (const auto& [what, s] : total.seconds) std::cout << "  " << what << ' ' << s;
  std::cout << '\n';
  const auto tell = [](const char* title, const std::map<std::string, Worst>& errors) {
    std::cout << "  worst error " << title << ":\n";
    for (const auto& [what, w] : errors)
      std::cout << "    " << std::setw(10) << w.value << "  " << what << "  (seed " << w.seed << ")\n";
  };
  tell("over what is allowed (f64: 1e-10 of the tensor's scale; else 2 x naive + floor)", total.worst);
  tell("relative to the scale", total.relative);
}

/// What a thousand configurations must have had.
constexpr std::string_view kAsked =
    "rows without keys|several branches|longer than a tile|grouped heads|batch 0|dropout|sink|gradient of lse|"
    "alias packed|alias q = k = v|alias k = v|NaN in a key masked somewhere|NaN or Inf in a key masked everywhere|"
    "NaN: query row|NaN: d_o row|logits +-1e4|logits around +1e4 or -1e4|strided operands|causality curve|"
    "dilation mode residue|dilation mode longnet|dilation mode head_groups|pattern window3d|pattern slide3d|"
    "pattern neighborhood3d|an axis is dilated|an axis strides|an axis is causal|shifted|a borrowed tail|a union|"
    "not all inputs watched|documents|queries named|the last queries|one query|softcap|alibi published|alibi learned|"
    "a sequence alone|relative on 1 axes|relative on 2 axes|relative on 3 axes|bias that masks nothing|bias that masks "
    "pairs|bias that masks a row|points|points of each row";
void expect_coverage(Report& total) {
  const bool cpu = device_under_test().is_cpu();
  std::vector<std::string_view> asked = split_text(kAsked, '|');
  asked.push_back(cpu ? "route cpu with terms" : "route plain with terms");
  if (cpu) asked.push_back("dual-number checks");
  else EXPECT_GT(total.count["route mma with terms"] + total.count["route hopper with terms"], 0);
  for (const std::string_view what : asked) EXPECT_GT(total.count[std::string(what)], 0) << "never drawn: " << what;
}

}  // namespace

TEST(AttentionFuzz, AgreesWithTheDefinitions) {
  const int before = thread_count();
  mallopt(M_PERTURB, 0x80);  // what malloc returns is full of large numbers, NaNs in f16
  if (const std::uint64_t seed = setting("HILT_FUZZ_SEED", 0)) return replay(seed);
  const std::uint64_t first = setting("HILT_FUZZ_FIRST", 1), count = setting("HILT_FUZZ_COUNT", scaled(5000, 1000));
  const auto start = std::chrono::steady_clock::now();
  auto [total, failures] = judge_all(first, count);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::size_t failed = tell_failures(failures);
  std::cout << count << " configurations, " << failed << " failed, in " << std::setprecision(3) << seconds << " s\n";
  tell_report(total);
  if (count >= 1000) expect_coverage(total);
  set_thread_count(before);
  mallopt(M_PERTURB, 0);
}
