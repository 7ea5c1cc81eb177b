// Orders: the text a user writes, the bijection it stands for, and a cache of those. pi enumerates
// a grid and skips cells beyond the length; a chunked order repeats one chunk. rho is read off pi.
#include "ops/hilbert/plan/order.h"
#include <bit>
#include <cstdlib>
#include <set>
#include "core/io/text.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {
namespace {

using Scope = Order::Scope;

constexpr Index kMaxLength = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kEntryOverhead = 512;  // about what nodes, key and vectors take besides the tables

constexpr std::array<std::string_view, 7> kOrderNames{"row",     "snake", "morton", "tiles",
                                                      "hilbert", "auto",  "given"};  // by Order::Kind
constexpr std::array<std::string_view, 3> kOptions{"scope", "chunk", "steps"};
constexpr std::array<std::string_view, 3> kScopes{"global", "segment", "order-only"};  // by Scope, but for chunked
constexpr std::array<std::string_view, 2> kSteps{"near", "unit"};                      // by Steps

Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }

/// A whole number from 1 to 2^31 - 1 and nothing else; 0 if it is not.
Index read_positive(std::string_view text) { return std::max(number_in<std::int32_t>(text).value_or(0), 0); }

// ---- from an order and a length to what is to be enumerated -------------------------------------

/// What must hold of any order; `where` opens messages.
void check_order(const Order& order, Index length, const std::string& where) {
  const Grid& grid = order.grid;
  check(length >= 0 && length <= kMaxLength, where, ": ", length,
        " tokens; positions are 32-bit, so from 0 to 2147483647");
  check(order.tile_height > 0 && order.tile_width > 0, where, ": sides of a tile must be positive");
  check(order.scope != Scope::chunked || (order.chunk > 0 && order.chunk <= kMaxLength), where,
        ": chunk must be from 1 to 2147483647, got ", order.chunk);
  check(order.steps == Steps::near || order.kind == Order::Kind::hilbert, where,
        ": steps can only be asked of hilbert");
  if (order.folds()) return;
  check(grid.width > 0 && grid.height > 0 && grid.frames > 0, where, ": sides of a grid must be positive");
  check(walks(order.kind, grid), where, ": only hilbert and row take three sides");
  const Index cells = grid.cells();
  if (order.scope == Scope::per_segment) return;  // the segment is not known yet
  if (order.scope == Scope::chunked)
    check(cells == length || cells == order.chunk, where, ": a grid of ", to_string(grid), " has ", cells,
          " cells, but there are ", length, " tokens in chunks of ", order.chunk,
          "; give the grid of all tokens or of one chunk");
  else
    check(cells == length, where, ": a grid of ", to_string(grid), " has ", cells, " cells, but there are ", length,
          " tokens; without a grid any length folds");
}

/// The grid of one chunk where there is a grid: it, or so many of its rows (or frames).
Grid chunk_grid(const Order& order) {
  const Grid& grid = order.grid;
  if (grid.cells() == order.chunk) return grid;
  const Index frame = grid.width * grid.height;
  if (order.chunk > frame) return {grid.width, grid.height, ceil_div(order.chunk, frame)};
  return {std::min(grid.width, order.chunk), ceil_div(order.chunk, grid.width)};
}

/// The order that names everything and nothing else, for the cache to compare. Scope is global or
/// chunked, the grid that of the enumeration.
Order resolve(Order order, Index length) {
  const std::string where = "order (" + to_string(order) + ")";
  check_order(order, length, where);
  check(order.kind != Order::Kind::automatic, where, ": a plan chooses it; make one of a pattern");
  check(order.kind != Order::Kind::given, "order (given): a plan or a call says which; see PlanSpec::given");
  check(order.scope != Scope::per_segment, where,
        ": scope=segment needs a pattern with segments; give chunk=N instead");
  if (order.kind == Order::Kind::row || length <= 1 || row_order_forced()) return {};
  const bool own_grid = !order.folds() && order.scope == Scope::chunked && order.grid.cells() == order.chunk;
  if (order.scope != Scope::chunked || (order.chunk >= length && !own_grid))
    order.scope = Scope::global, order.chunk = 0;
  if (order.folds()) order.grid = fold(order.scope == Scope::chunked ? order.chunk : length);
  else if (order.scope == Scope::chunked) order.grid = chunk_grid(order);
  if (order.kind != Order::Kind::tiles) order.tile_height = order.tile_width = 0;
  return order;
}

// ---- enumeration: the tokens below a limit, in order --------------------------------------------

/// One aligned square of 2^k a side, its quadrants in the order of their codes; squares off the
/// grid are cut whole, so that thin grids cost no more than square ones. As deep as k.
template <class F> void morton(const Grid& grid, Index x, Index y, Index side, const F& cell) {
  if (x >= grid.width || y >= grid.height) return;
  if (side == 1) return cell(x, y);
  const Index half = side / 2;
  for (const Index below : {0, 1})
    for (const Index right : {0, 1}) morton(grid, x + half * right, y + half * below, half, cell);
}

std::vector<std::int32_t> enumerate(const Order& order, Index limit) {
  if (order.kind == Order::Kind::hilbert) return hilbert_walk(order.grid, limit, order.steps);
  const Grid grid = order.kind == Order::Kind::row ? Grid{limit, 1} : order.grid;
  std::vector<std::int32_t> tokens;
  tokens.reserve(static_cast<std::size_t>(limit));
  const auto add = [&](Index x, Index y) {
    if (const Index token = y * grid.width + x; token < limit) tokens.push_back(static_cast<std::int32_t>(token));
  };
  if (order.kind == Order::Kind::morton) {
    const auto longest = static_cast<std::uint64_t>(std::max(grid.width, grid.height));
    morton(grid, 0, 0, static_cast<Index>(std::bit_ceil(longest)), add);
    return tokens;
  }
  // Rows are tiles as wide as the grid; a snake turns back in every other.
  const bool tiles = order.kind == Order::Kind::tiles, snake = order.kind == Order::Kind::snake;
  const Index height = tiles ? order.tile_height : 1, width = tiles ? order.tile_width : grid.width;
  for (Index y0 = 0; y0 < grid.height; y0 += height)
    for (Index x0 = 0; x0 < grid.width; x0 += width)
      for (Index y = y0; y < std::min(y0 + height, grid.height); ++y)
        for (Index x = x0; x < std::min(x0 + width, grid.width); ++x) add(snake && y % 2 ? grid.width - 1 - x : x, y);
  return tokens;
}

Permutation build(const Order& order, Index length) {
  if (order.scope != Scope::chunked) return make_permutation(enumerate(order, length));
  std::vector<std::int32_t> token_at;
  token_at.reserve(static_cast<std::size_t>(length));
  const std::vector<std::int32_t> chunk = enumerate(order, std::min(order.chunk, length));
  for (Index begin = 0; begin < length; begin += order.chunk)
    for (const std::int32_t token : chunk)
      if (token < length - begin) token_at.push_back(static_cast<std::int32_t>(begin + token));
  return make_permutation(std::move(token_at));
}

}  // namespace

// ---- text ---------------------------------------------------------------------------------------

Grid read_grid(const std::string& where, std::string_view part, bool box_allowed) {
  const std::vector<std::string_view> sides = split_text(part, 'x');
  std::vector<Index> n;
  if (sides.size() == 2 || (sides.size() == 3 && box_allowed))
    for (const std::string_view side : sides) n.push_back(read_positive(side));
  check(!n.empty() && std::count(n.begin(), n.end(), 0) == 0, where, ": expected HEIGHTxWIDTH",
        box_allowed ? " or FRAMESxHEIGHTxWIDTH" : "", ", each from 1 to 2147483647, got '", shown(part), "'");
  return n.size() == 2 ? Grid{n[1], n[0]} : Grid{n[2], n[1], n[0], n[0] == 1};
}

Order parse_order(std::string_view text, Index length) {
  const std::string where = "order (" + std::string(text) + ")";
  const auto named = [&](const char* what, std::string_view name, std::span<const std::string_view> names) {
    return find_name((where + what).c_str(), name, names);
  };
  const std::vector<std::string_view> fields = split_text(text, ',');
  const auto [name, shape] = cut_text(fields[0], ':');
  Order order;
  order.kind = static_cast<Order::Kind>(named("", name, kOrderNames));
  if (name != fields[0]) {
    const auto [front, behind] = cut_text(shape, '/');
    const bool tiles = order.kind == Order::Kind::tiles, folds = tiles && front == shape;
    if (!folds) order.grid = read_grid(where, tiles ? front : shape, walks(order.kind, {1, 1, 2}));
    if (tiles) {
      const Grid tile = read_grid(where, folds ? shape : behind, false);
      order.tile_height = tile.height, order.tile_width = tile.width;
    }
  }
  check(order.kind != Order::Kind::automatic || fields.size() == 1, where,
        ": auto takes a grid and no options; give them with an order of your own");
  check(order.kind != Order::Kind::given || text == "given", where, ": given takes no grid and no options");
  std::set<std::string_view> keys;
  for (const std::string_view field : std::span(fields).subspan(1)) {
    const auto [key, value] = cut_text(field, '=');
    (void)named(": option", key, kOptions);
    if (key == "scope") order.scope = static_cast<Scope>(named(": scope", value, kScopes));
    else if (key == "steps") order.steps = static_cast<Steps>(named(": steps", value, kSteps));
    else {
      order.scope = Scope::chunked, order.chunk = read_positive(value);
      check(order.chunk > 0, where, ": chunk must be from 1 to 2147483647, got '", value, "'");
    }
    check(keys.insert(key).second, where, ": option '", key, "' is given twice");
    check(!keys.contains("chunk") || !keys.contains("scope"), where,
          ": chunk=N is a scope of its own; give scope or chunk, not both");
  }
  check_order(order, length, where);
  return order;
}

std::string to_string(const Order& order) {
  std::string text(kOrderNames[static_cast<std::size_t>(order.kind)]);
  if (!order.folds()) text += ":" + to_string(order.grid);
  if (order.kind == Order::Kind::tiles) {
    const Grid tile{order.tile_width, order.tile_height};
    const bool usual = tile == Grid{Order{}.tile_width, Order{}.tile_height};
    if (!order.folds() || !usual) text += (order.folds() ? ":" : "/") + to_string(tile);
  }
  if (order.scope == Scope::chunked) text += ",chunk=" + std::to_string(order.chunk);
  else if (order.scope != Scope::global)
    text += ",scope=" + std::string(kScopes[static_cast<std::size_t>(order.scope)]);
  if (order.steps == Steps::unit) text += ",steps=unit";
  return text;
}

// ---- geometry -----------------------------------------------------------------------------------

bool walks(Order::Kind kind, const Grid& grid) {
  return grid.frames == 1 || kind == Order::Kind::row || kind == Order::Kind::hilbert || kind == Order::Kind::automatic;
}

Order with_segment(Order order, Index segment) {
  if (order.scope != Scope::per_segment) return order;
  check(segment > 0, "with_segment: a segment of ", segment, " tokens; expected at least 1");
  order.scope = Scope::chunked;
  order.chunk = std::min(segment, kMaxLength);  // longer than any sequence either way
  return order;
}

Grid fold(Index length) {
  check(length >= 0 && length <= kMaxLength, "fold: ", length, " tokens; expected 0 to 2147483647");
  Index width = 1;
  while (width * width < length) width *= 2;
  return {width, ceil_div(length, width)};
}

Grid token_grid(const Order& order, Index length) {
  return !order.folds() && order.grid.cells() == length ? order.grid : fold(length);
}

// ---- permutations -------------------------------------------------------------------------------

Permutation make_permutation(std::vector<std::int32_t> token_at) {
  check(std::ssize(token_at) <= kMaxLength, "make_permutation: ", token_at.size(),
        " tokens; expected at most 2147483647");
  std::vector<std::int32_t> position_of = inverse_within(token_at, {}, 0);
  return {std::move(token_at), std::move(position_of)};
}

Permutation build_permutation(const Order& order, Index length) { return build(resolve(order, length), length); }

bool row_order_forced() {
  const char* forced = std::getenv("HILT_FORCE_ORDER");
  if (forced == nullptr || *forced == '\0') return false;
  check(std::string_view(forced) == "row", "HILT_FORCE_ORDER (", forced, "): only row can be forced; unset it");
  return true;
}

// ---- the cache ----------------------------------------------------------------------------------

PermutationCache::PermutationCache(std::size_t max_bytes)
    : Recent(std::numeric_limits<std::size_t>::max(), max_bytes) {}

std::shared_ptr<const Permutation> PermutationCache::get(const Order& order, Index length) {
  const std::pair key{resolve(order, length), length};
  return Recent::get(
      key, [&] { return std::make_shared<const Permutation>(build(key.first, length)); },
      [](const auto& p) {
        return kEntryOverhead + (p->token_at.size() + p->position_of.size()) * sizeof(std::int32_t);
      });
}

PermutationCache& permutation_cache() {
  static PermutationCache cache(std::size_t{256} << 20);  // 32 orders of 1 M tokens
  return cache;
}

std::shared_ptr<const Permutation> permutation(const Order& order, Index length) {
  return permutation_cache().get(order, length);
}

}  // namespace hilt
