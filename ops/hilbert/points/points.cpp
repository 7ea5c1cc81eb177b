// Orders of points: a cube around each document, codes of the cells in it, a stable sort by code.
// Below a cell a curve runs as a state says. A table has, for each state and each cell some levels
// below, the digits of that cell's code and the state there, so a code takes a few look-ups.
#include "ops/hilbert/points/points.h"
#include "core/dispatch.h"
#include "core/io/text.h"
#include "core/parallel.h"
#include "ops/hilbert/points/cells.h"

namespace hilt {
namespace {

using namespace kernels;

constexpr const char* kOp = "order_of_points";
constexpr Index kPiece = Index{1} << 14;  // points worth a task

/// Which axis stands where, and whether it is reflected: one of 4 in the plane, of 24 in space.
struct State {
  std::array<unsigned, 3> axis{0, 1, 2}, flip{};
  friend bool operator==(const State&, const State&) = default;
};

/// A level of Skilling's transform, which on two axes is the classic curve: the digit of the cell
/// `bits`, x in the lowest, and the state below it.
unsigned hilbert_digit(State& state, unsigned bits, unsigned axes) {
  auto& [axis, flip] = state;
  unsigned digit = 0, gray = 0;
  for (unsigned a = 0; a < axes; ++a) {
    const unsigned x = (bits >> axis[a] & 1) ^ flip[a];
    digit = 2 * digit + (gray ^= x);
    if (x) flip[0] ^= 1;
    else std::swap(axis[0], axis[a]), std::swap(flip[0], flip[a]);
  }
  flip[0] ^= gray;
  return digit;
}

/// An entry has a state above the digits of some levels. It stands where the state before is, above
/// the bits of the cell, those of x in the lowest.
std::vector<std::uint16_t> tabulated(bool hilbert, unsigned axes) {
  const unsigned levels = levels_at_once(axes), width = axes * levels;
  std::vector<State> states(1);
  std::vector<std::uint16_t> table;
  for (std::size_t s = 0; s < states.size(); ++s)
    for (unsigned cell = 0; cell < 1u << width; ++cell) {
      State state = states[s];
      unsigned code = 0;
      for (unsigned level = levels; level-- > 0;) {
        unsigned bits = 0;
        for (unsigned a = 0; a < axes; ++a) bits |= (cell >> (a * levels + level) & 1) << a;
        code = code << axes | (hilbert ? hilbert_digit(state, bits, axes) : bits);
      }
      const auto next = std::ranges::find(states, state) - states.begin();
      if (next == std::ssize(states)) states.push_back(state);
      table.push_back(static_cast<std::uint16_t>(next << width | code));
    }
  return table;
}

template <unsigned axes, class T> void surround(Cells& cells, const T* x, Index n) {
  cells.side = 0;
  for (unsigned a = 0; a < axes; ++a) {
    T low = x[a], high = x[a];
    for (Index i = 1; i < n; ++i) low = std::min(low, x[i * axes + a]), high = std::max(high, x[i * axes + a]);
    cells.low[a] = static_cast<double>(low);
    cells.side = std::max(cells.side, static_cast<double>(high) - cells.low[a]);
  }
  if (cells.side == 0) cells.side = 1;
}

template <class T> void check_points(const Cells& cells, const T* x, Index n, Index axes) {
  constexpr bool kScaled = is_floating(dtype_of<T>);
  const T* const refused = std::find_if_not(x, x + n * axes, [&](T coordinate) { return has_cell(cells, coordinate); });
  if (const Index at = refused - x; at < n * axes)
    fail(kOp, ": row ", at / axes, " has ", +*refused, " on axis ", at % axes, "; expected ",
         kScaled ? "a finite number below 2^1022" : "a cell, from 0 to below 2^",
         kScaled ? "" : std::to_string(cells.bits));
}

struct Entry {
  std::uint64_t code;
  Index row;
  friend auto operator<=>(const Entry&, const Entry&) = default;
};

/// Sorts by eight bits of the code, then runs of equals by the next eight: pieces count, and each
/// writes behind those before it. Rows ascend. The result is in `from` if it is to stay, or `to`.
void sort(Entry* from, Entry* to, Index n, int shift, bool stay) {
  if (n <= 64) std::sort(from, from + n);
  if ((n <= 64 || shift < 0) && !stay) std::copy(from, from + n, to);
  if (n <= 64 || shift < 0) return;
  const Index piece = std::max(kPiece, n / 256 + 1);
  std::vector<std::array<Index, 256>> next(static_cast<std::size_t>((n + piece - 1) / piece));
  const auto each = [&](const auto& f) {
    parallel_for(n, piece, [&](Index begin, Index end) {
      auto& of_piece = next[static_cast<std::size_t>(begin / piece)];
      for (Index i = begin; i < end; ++i) f(from[i], of_piece[from[i].code >> shift & 255]);
    });
  };
  each([](const Entry&, Index& count) { ++count; });
  Index place = 0;
  for (std::size_t d = 0; d < 256; ++d)
    for (auto& of_piece : next) place += std::exchange(of_piece[d], place);
  each([to](const Entry& entry, Index& at) { to[at++] = entry; });
  parallel_for(256, 1, [&](Index d, Index) {
    const Index begin = d > 0 ? next.back()[static_cast<std::size_t>(d - 1)] : 0;
    sort(to + begin, from + begin, next.back()[static_cast<std::size_t>(d)] - begin, shift - 8, !stay);
  });
}

/// A document of rows from `first` on, which is x; entries and spare: room for n.
template <unsigned axes, class T>
void order_document(Cells cells, const T* x, Index first, Index n, Entry* entries, Entry* spare, Index* pi,
                    Index* rho) {
  if constexpr (is_floating(dtype_of<T>)) surround<axes>(cells, x, n);
  parallel_for(n, kPiece, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) entries[i] = {code_of<axes>(cells, x + i * axes), first + i};
  });
  sort(entries, spare, n, static_cast<int>((axes * cells.bits - 1) / 8 * 8), true);
  parallel_for(n, kPiece, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) rho[pi[first + i] = entries[i].row] = first + i;
  });
}

}  // namespace

PointOrder order_of_points(const Tensor& xyz, std::string_view kind, int bits, const std::vector<Index>& documents) {
  check(xyz.rank() == 2 && (xyz.dim(1) == 2 || xyz.dim(1) == 3), kOp, ": needs points [N, 2 or 3], got ", xyz.shape());
  const Index n = xyz.dim(0), axes = xyz.dim(1), most = axes == 2 ? 31 : 20;
  constexpr std::array<std::string_view, 4> kKinds{"hilbert", "morton", "hilbert-trans", "morton-trans"};
  const std::size_t named = find_name("order_of_points: kind", kind, kKinds);
  check(1 <= bits && bits <= most, kOp, ": ", bits, " bits; expected 1..", most, " on ", axes, " axes");
  std::vector<Index> bounds{0};  // where documents begin, and the end
  for (const Index length : documents.empty() ? std::vector{n} : documents) {
    check(length > 0 || documents.empty(), kOp, ": a document of ", length, " points; expected at least 1");
    bounds.push_back(checked_add(bounds.back(), length, kOp));
  }
  check(bounds.back() <= n, kOp, ": the documents hold ", bounds.back(), " points, xyz ", n);
  static const std::array tables{tabulated(true, 2), tabulated(false, 2), tabulated(true, 3), tabulated(false, 3)};
  const std::vector<std::uint16_t>& table = tables[(axes == 3) * 2 + named % 2];
  Cells cells{.bits = static_cast<unsigned>(bits), .table = table.data()};
  if (named >= 2) std::reverse(cells.axis.begin(), cells.axis.begin() + axes);
  const Tensor points = dense(xyz);
  if constexpr (kHasCuda)
    if (points.device().is_cuda())
      return kernels::order_of_points(cuda_of(points.device()),
                                      converted(points, is_floating(points.dtype()) ? DType::f64 : DType::i64), cells,
                                      table, bounds);
  PointOrder order{empty({n}, DType::i64), empty({n}, DType::i64)};
  auto *const pi = order.token_at.mutable_data<Index>(), *const rho = order.position_of.mutable_data<Index>();
  Tensor memory = empty({4 * n}, DType::i64);
  auto* const entries = reinterpret_cast<Entry*>(memory.mutable_raw());
  with_type(xyz.dtype(), [&]<class T>() {
    const T* const x = points.data<T>();
    check_points(cells, x, bounds.back(), axes);
    parallel_for(n > 0 ? std::ssize(bounds) - 1 : 0, 1, [&](Index d, Index) {  // one alone has all threads
      const Index first = bounds[static_cast<std::size_t>(d)], rows = bounds[static_cast<std::size_t>(d) + 1] - first;
      (axes == 2 ? order_document<2, T> : order_document<3, T>)(cells, x + first * axes, first, rows, entries + first,
                                                                entries + n + first, pi, rho);
    });
  });
  for (Index row = bounds.back(); row < n; ++row) pi[row] = rho[row] = row;
  return order;
}

}  // namespace hilt
