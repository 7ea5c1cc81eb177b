// Hilbert curves on squares, rectangles and boxes.
//
// The curve is split recursively, on any grid; on a 2^k square that is the classic one. A box has a
// first cell and signed sides a, b, c; its curve runs from there along a, the major side. On a
// rectangle (c = 1), with w = |a| and h = |b|:
//   2w > 3h    two boxes, one after the other along a
//   else       up, long, down: up the first half of b, along all of a in the other half, back down
//      +-----------+        up:    sides b', a'        from the first cell
//      |   long    |        long:  sides a,  b - b'    beyond b'
//      +-----+-----+        down:  sides -b', a' - a   from the far end of a, at the last row of b'
//      | up  | down|
//      +-----+-----+        each ends beside the cell where the next begins.
// A half is floored, signed (-3 / 2 = -2), and made even where that is possible: only an odd major
// side over an even minor one then leaves a diagonal step. Boxes split so in two, three or five.
#include "ops/hilbert/plan/order.h"
#include <algorithm>
#include <cstdlib>

namespace hilt {

static Index sign(Index n) { return n < 0 ? -1 : 1; }

Index Grid::cells() const {
  check(width >= 0 && height >= 0 && frames >= 0, "Grid: sides ", frames, " x ", height, " x ", width,
        " must not be negative");
  return checked_mul(checked_mul(width, height, "Grid"), frames, "Grid");
}

std::string to_string(const Grid& grid) {
  const std::string plane = std::to_string(grid.height) + 'x' + std::to_string(grid.width);
  return grid.has_frames() ? std::to_string(grid.frames) + 'x' + plane : plane;
}

Cell cell_of(const Grid& grid, Index token) {
  const Index row = token / grid.width;
  return {token % grid.width, row % grid.height, row / grid.height};
}

Index token_of(const Grid& grid, const Cell& cell) { return (cell.z * grid.height + cell.y) * grid.width + cell.x; }

namespace {

/// |n| cells along an axis (0, 1, 2 for x, y, z), towards lower coordinates when n < 0.
struct Edge {
  int axis = 0;
  Index n = 0;
};
Edge operator-(Edge s) { return {s.axis, -s.n}; }
Edge operator-(Edge s, Edge part) { return {s.axis, s.n - part.n}; }
Edge even_half(Edge s) {
  const Index half = s.n >> 1;  // an arithmetic shift floors
  return {s.axis, (half & 1) != 0 && std::abs(s.n) > 2 ? half + sign(s.n) : half};
}

using Point = std::array<Index, 3>;
Point beyond(Point p, Edge s) { return p[static_cast<std::size_t>(s.axis)] += s.n, p; }
Point at_end(Point p, Edge s) { return p[static_cast<std::size_t>(s.axis)] += s.n - sign(s.n), p; }

struct Block {
  Point at{};  // the first cell
  Edge a, b, c;
  bool flat = false;  // a rectangle: split by the rule of two dimensions

  Index cells() const { return std::abs(a.n * b.n * c.n); }
  bool contains(const Point& p) const { return within(p, a) && within(p, b) && within(p, c); }
  /// The side along which a box one cell thick runs; nullptr while there is something to split.
  const Edge* line() const {
    const bool thin_a = std::abs(a.n) == 1, thin_b = std::abs(b.n) == 1, thin_c = std::abs(c.n) == 1;
    return thin_b && thin_c ? &a : thin_a && thin_c ? &b : thin_a && thin_b ? &c : nullptr;
  }

 private:
  bool within(const Point& p, Edge s) const {
    const auto axis = static_cast<std::size_t>(s.axis);
    const Index offset = (p[axis] - at[axis]) * sign(s.n);
    return 0 <= offset && offset < std::abs(s.n);
  }
};

/// Calls visit(part) in curve order until it returns true. A part may be empty: half of a side of 1
/// is 0.
template <class Visit> bool split(const Block& box, Visit&& visit) {
  const auto& [at, a, b, c, flat] = box;
  const Index w = std::abs(a.n), h = std::abs(b.n), d = std::abs(c.n);
  const Edge a1 = even_half(a), b1 = even_half(b), c1 = even_half(c), a2 = a - a1, b2 = b - b1, c2 = c - c1;
  if (2 * w > 3 * h && 2 * w > 3 * d)  // long: halves along a
    return visit(Block{at, a1, b, c, flat}) || visit(Block{beyond(at, a1), a2, b, c, flat});
  if (flat) {  // up, long and down
    const Edge half{a.axis, a.n >> 1};
    return visit(Block{at, b1, half, c, flat}) || visit(Block{beyond(at, b1), a, b2, c, flat}) ||
           visit(Block{at_end(at_end(at, a), b1), -b1, -(a - half), c, flat});
  }
  if (3 * h > 4 * d)  // shallow in c: up, long and down in b
    return visit(Block{at, b1, c, a1, flat}) || visit(Block{beyond(at, b1), a, b2, c, flat}) ||
           visit(Block{at_end(at_end(at, a), b1), -b1, c, -a2, flat});
  if (3 * d > 4 * h)  // shallow in b: up, long and down in c
    return visit(Block{at, c1, a1, b, flat}) || visit(Block{beyond(at, c1), a, b, c2, flat}) ||
           visit(Block{at_end(at_end(at, a), c1), -c1, -a2, b, flat});
  // near a cube: along b, along c, across on a, back along c, back along b
  return visit(Block{at, b1, c1, a1, flat}) || visit(Block{beyond(at, b1), c, a1, b2, flat}) ||
         visit(Block{at_end(at_end(at, b1), c), a, -b1, -c2, flat}) ||
         visit(Block{at_end(beyond(at_end(at, a), b1), c), -c, -a2, b2, flat}) ||
         visit(Block{at_end(at_end(at, a), b1), -b1, c1, -a2, flat});
}

/// The whole grid, with the major side chosen.
Block whole(const char* op, const Grid& grid, Steps steps) {
  check(grid.width > 0 && grid.height > 0 && grid.frames > 0, op, ": a grid of ", grid.frames, " x ", grid.height,
        " x ", grid.width, " has no cells");
  check(std::max({grid.width, grid.height, grid.frames}) < Index{1} << 31, op, ": a grid of ", grid.frames, " x ",
        grid.height, " x ", grid.width, " has a side above 2^31 - 1");
  (void)grid.cells();  // positions are 64-bit
  Block box{{}, {0, grid.width}, {1, grid.height}, {2, grid.frames}, false};
  box.flat = box.a.n == 1 || box.b.n == 1 || box.c.n == 1;
  if (box.flat) {
    if (box.c.n != 1) std::swap(box.b.n == 1 ? box.b : box.a, box.c);  // the side of 1 goes last
    if (box.a.axis > box.b.axis) std::swap(box.a, box.b);
    if (box.b.n > box.a.n) std::swap(box.a, box.b);  // default: the longer side, the first of equals
    if (box.a.n % 2 == 1 && box.b.n % 2 == 0 && (steps == Steps::unit || box.a.n < 3 * box.b.n))
      std::swap(box.a, box.b);
  } else {
    check(steps == Steps::near || (box.a.n % 2 == 0 && box.b.n % 2 == 0 && box.c.n % 2 == 0), op,
          ": unit steps through a box need even sides, got ", grid.frames, " x ", grid.height, " x ", grid.width);
    if (box.c.n > std::max(box.a.n, box.b.n)) box = {{}, box.c, box.a, box.b, false};
    else if (box.b.n > box.a.n) std::swap(box.a, box.b);
  }
  return box;
}

/// Recursion is as deep as the sum of the logarithms of the sides: below 100.
template <class Emit> void walk(const Block& box, Emit& emit) {
  if (const Edge* line = box.line()) return emit(box.at, *line);
  split(box, [&](const Block& part) {
    if (part.cells() > 0) walk(part, emit);
    return false;
  });
}

/// Down to the line that holds a position or a cell: holds(part) says whether that part does.
template <class Holds> Block descend(Block box, Holds holds) {
  while (box.line() == nullptr) {
    Block next;
    split(box, [&](const Block& part) { return holds(part) ? next = part, true : false; });
    box = next;
  }
  return box;
}

}  // namespace

Cell hilbert_cell(const Grid& grid, Index position, Steps steps) {
  Block box = whole("hilbert_cell", grid, steps);
  check(0 <= position && position < box.cells(), "hilbert_cell: position ", position, " must be from 0 to ",
        box.cells() - 1);
  box = descend(box, [&](const Block& part) {
    if (position < part.cells()) return true;
    position -= part.cells();
    return false;
  });
  const Edge line = *box.line();
  box.at[static_cast<std::size_t>(line.axis)] += position * sign(line.n);
  return {box.at[0], box.at[1], box.at[2]};
}

/// The same on a square of 2^k cells a side, where each level is two bits: layouts of blocks ask
/// often.
static Index position_in_square(Index side, Index x, Index y) {
  Index position = 0;
  for (Index s = side / 2; s > 0; s /= 2) {
    const Index rx = (x & s) != 0, ry = (y & s) != 0;
    position += s * s * ((3 * rx) ^ ry);
    if (ry == 1) continue;
    if (rx == 1) x = side - 1 - x, y = side - 1 - y;  // flips the bits below s; those above are spent
    std::swap(x, y);
  }
  return position;
}

Index hilbert_position(const Grid& grid, const Cell& cell, Steps steps) {
  Block box = whole("hilbert_position", grid, steps);
  const Point p{cell.x, cell.y, cell.z};
  check(box.contains(p), "hilbert_position: cell (", cell.x, ", ", cell.y, ", ", cell.z, ") lies outside a grid of ",
        grid.frames, " x ", grid.height, " x ", grid.width);
  if (grid.frames == 1 && grid.width == grid.height && std::has_single_bit(static_cast<std::uint64_t>(grid.width)))
    return position_in_square(grid.width, cell.x, cell.y);
  Index position = 0;
  box = descend(box, [&](const Block& part) {
    if (part.contains(p)) return true;
    position += part.cells();
    return false;
  });
  const auto axis = static_cast<std::size_t>(box.line()->axis);
  return position + std::abs(p[axis] - box.at[axis]);
}

std::vector<std::int32_t> hilbert_walk(const Grid& grid, Index limit, Steps steps) {
  const Block box = whole("hilbert_walk", grid, steps);
  check(0 <= limit && limit <= std::numeric_limits<std::int32_t>::max(), "hilbert_walk: limit ", limit,
        " must be from 0 to 2^31 - 1");
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(std::min(limit, box.cells())));
  const Index stride[] = {1, grid.width, grid.width * grid.height};
  auto next = tokens.begin();
  const auto emit = [&](const Point& at, Edge line) {
    Index token = token_of(grid, {at[0], at[1], at[2]});
    const Index step = stride[line.axis] * sign(line.n);
    for (Index i = std::abs(line.n); i > 0; --i, token += step)
      if (token < limit) *next++ = static_cast<std::int32_t>(token);
  };
  walk(box, emit);
  return tokens;
}

}  // namespace hilt
