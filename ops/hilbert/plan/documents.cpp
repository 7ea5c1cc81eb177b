// Lists of documents as text, and where equal ones lie.
#include "ops/hilbert/plan/documents.h"
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include "core/error.h"
#include "core/io/text.h"
#include "ops/hilbert/plan/placed.h"

namespace hilt {

static std::string text_of(const Document& d) {
  if (d.folds()) return std::to_string(d.length);
  const std::string plane = std::to_string(d.grid.height) + 'x' + std::to_string(d.grid.width);
  return d.grid.has_frames() ? std::to_string(d.grid.frames) + 'x' + plane : plane;
}

static Document read_document(std::string_view text, std::string_view all) {
  const auto side = [&](std::string_view part) {
    const Index n = read_index("documents", part, 1);
    check(n <= std::numeric_limits<std::int32_t>::max(), "documents: ", shown(all), ": ", n, " must be 1..2147483647");
    return n;
  };
  const std::vector<std::string_view> sides = split_text(text, 'x');
  if (sides.size() == 1) return side(sides[0]);
  if (sides.size() == 2) return Grid{side(sides[1]), side(sides[0])};
  check(sides.size() == 3, "documents: '", shown(text), "': expected LENGTH, HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH");
  return Grid{side(sides[2]), side(sides[1]), side(sides[0]), sides[0] == "1"};
}

std::vector<DocumentList> parse_documents(std::string_view text) {
  std::vector<DocumentList> rows;
  for (const std::string_view row : split_text(text, '/')) {
    rows.emplace_back();
    for (const std::string_view document : split_text(row, ',')) rows.back().push_back(read_document(document, text));
  }
  return rows;
}

std::string to_string(const std::vector<DocumentList>& rows) {
  std::string text;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (row > 0) text += '/';
    for (std::size_t i = 0; i < rows[row].size(); ++i) text += (i > 0 ? "," : "") + text_of(rows[row][i]);
  }
  return text;
}

void check_documents(const PlanSpec& spec, const Branch* looks_at_grid) {
  check(spec.order.folds(), "plan: order ", to_string(spec.order),
        " names a grid, and grids belong to documents: ", to_string({spec.documents[0]}));
  check(!spec.in_order, "plan: documents stand as tokens, not in the order of each: in_order must be false");
  for (const Branch& b : spec.pattern)
    check(b.kind != Branch::Kind::blocks, "plan: ", to_string({b}), ": blocks are of a whole row, and cannot be of ",
          "documents");
  for (std::size_t row = 0; row < spec.documents.size(); ++row) {
    Index tokens = 0;
    for (const Document& d : spec.documents[row]) {
      check(d.length >= 1 && (d.folds() || d.grid.cells() == d.length), "plan: a document of ", d.length,
            " tokens on a grid of ", text_of(d));
      check(!looks_at_grid || !d.folds(), "plan: ", looks_at_grid ? to_string({*looks_at_grid}) : "",
            " needs a grid in every document; one of row ", row, " has ", d.length, " tokens and no grid");
      tokens += d.length;
    }
    check(tokens <= spec.length, "plan: the documents of row ", row, " hold ", tokens, " tokens, but a row has ",
          spec.length);
  }
}

std::vector<PlacedDocument> placed_documents(const PlanSpec& spec) {
  std::vector<PlacedDocument> out;
  std::map<std::pair<Document, decltype(spec.queries)>, std::size_t> known;
  for (std::size_t row = 0; row < spec.documents.size(); ++row) {
    Index first = 0;
    for (const Document& d : spec.documents[row]) {
      const auto k = static_cast<std::int32_t>(first);
      std::int32_t q = k;
      first += d.length;
      decltype(spec.queries) own;
      if (spec.queries) {
        const auto begin = std::ranges::lower_bound(*spec.queries, k),
                   end = std::ranges::lower_bound(*spec.queries, first);
        if (begin == end) continue;
        q = static_cast<std::int32_t>(begin - spec.queries->begin());
        for (std::int32_t& token : own.emplace(begin, end)) token -= k;
      }
      const auto [entry, fresh] = known.try_emplace({d, own}, out.size());
      if (fresh) out.push_back({d, std::move(own), {{}, spec.documents.size() == 1}});
      out[entry->second].places.list.push_back({static_cast<std::int32_t>(row), q, k});
    }
  }
  return out;
}

template <class X, class Shift> static void append(std::vector<X>& to, const std::vector<X>& from, Shift&& shift) {
  for (X x : from) shift(x), to.push_back(x);
}

/// `t` at a place, behind `row` and beyond its `end`: no test may take another document's key.
static void append(Tiling& row, const Tiling& t, const Tiling::Place& place, std::int32_t& end) {
  constexpr std::array kFirstAxis{&Tiling::k_a, &Tiling::q_a_low, &Tiling::q_a_high};
  std::int32_t first = 0;
  for (const auto list : kFirstAxis)
    if (!(t.*list).empty()) first = std::min(first, std::ranges::min(t.*list));
  const auto size = [](const auto& list) { return static_cast<std::int32_t>(list.size()); };
  const auto by = [](std::int32_t n) { return [n](std::int32_t& x) { x += n; }; };
  const auto range_by = [](std::int32_t n) { return [n](Tiling::Range& r) { r.begin += n, r.end += n; }; };
  const std::int32_t q = size(row.q_token), k = size(row.k_token), q_tiles = size(row.q_tile),
                     k_tiles = size(row.k_tile), refs = size(row.keys);
  append(row.q_token, t.q_token, by(place.q)), append(row.k_token, t.k_token, by(place.k));
  append(row.q_name, t.q_names(), by(place.k)), append(row.k_name, t.k_names(), by(place.k));
  append(row.q_tile, t.q_tile, range_by(q)), append(row.k_tile, t.k_tile, range_by(k));
  append(row.keys, t.keys, [&](Tiling::Ref& ref) { ref.tile += k_tiles; });
  append(row.queries, t.queries, [&](Tiling::Ref& ref) { ref.tile += q_tiles; });
  for (const auto& [begin, theirs] :
       {std::pair(&row.keys_begin, &t.keys_begin), {&row.queries_begin, &t.queries_begin}}) {
    if (!begin->empty()) begin->pop_back();
    append(*begin, *theirs, by(refs));
  }
  append(row.group, t.group, [&](Tiling::Group& g) { range_by(q)(g.q), range_by(k)(g.k); });
  row.causal = t.causal, row.boxes = t.boxes;
  const std::int32_t beyond = end - first;
  for (const auto list : kFirstAxis)
    append(row.*list, t.*list, [&](std::int32_t& x) { end = std::max(end, (x += beyond) + 1); });
  for (const auto list : {&Tiling::q_rank, &Tiling::k_rank, &Tiling::k_b, &Tiling::q_b_low, &Tiling::q_b_high,
                          &Tiling::k_c, &Tiling::q_c_low, &Tiling::q_c_high})
    append(row.*list, t.*list, by(0));
  row.tiles_full += t.tiles_full, row.tiles_partial += t.tiles_partial;
  row.pairs += t.pairs;
}

std::vector<PlanPart> whole_rows(const Plan& plan) {
  const auto& lists = plan.spec().documents;
  std::vector<PlanPart> rows;
  for (std::size_t row = 0; row < lists.size() && !plan.parts().empty(); ++row) {
    rows.push_back({plan.length(), plan.queries(), {}, {{{static_cast<std::int32_t>(row), 0, 0}}, lists.size() == 1}});
    std::vector<std::int32_t> ends(plan.parts()[0].tilings.size());
    for (const PlanPart& part : plan.parts()) {
      rows[row].tilings.resize(part.tilings.size());  // also where the row has no such document
      for (const Tiling::Place& place : part.places.list)
        if (place.row == static_cast<std::int32_t>(row))
          for (std::size_t i = 0; i < part.tilings.size(); ++i)
            append(rows[row].tilings[i], part.tilings[i], place, ends[i]);
    }
  }
  return rows;
}

}  // namespace hilt
