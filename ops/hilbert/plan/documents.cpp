// Lists of documents as text, and where equal ones lie.
#include "core/error.h"
#include "core/io/text.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {

static std::string text_of(const Document& d) { return d.folds() ? std::to_string(d.length) : to_string(d.grid); }

static Document read_document(std::string_view text, std::string_view all) {
  if (text.find('x') != text.npos) return read_grid("documents: " + shown(all), text, true);
  const Index n = read_index("documents", text, 1);
  check(n <= std::numeric_limits<std::int32_t>::max(), "documents: ", shown(all), ": ", n, " must be 1..2147483647");
  return n;
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

void check_documents(const PlanSpec& spec) {
  const auto planar = std::ranges::find_if(spec.pattern, &Branch::on_grid);
  check(spec.order.folds(), "plan: order ", to_string(spec.order),
        " names a grid, and grids belong to documents: ", to_string({spec.documents[0]}));
  check(!spec.in_order, "plan: documents stand as tokens, not in the order of each: in_order must be false");
  for (const Branch& b : spec.pattern)
    check(b.kind != Branch::Kind::blocks, "plan: ", to_string({b}), ": blocks are of a whole row, and cannot be of ",
          "documents");
  for (std::size_t row = 0; row < spec.documents.size(); ++row) {
    Index tokens = 0, number = 0;
    for (const Document& d : spec.documents[row]) {
      if (d.length < 1)
        fail("plan: document ", number, " of row ", row, " is ", text_of(d),
             ": expected at least 1 token; list lengths and grids, not where documents begin and end");
      const Index before = prefix_of(spec.pattern);
      if (!d.folds() && before + d.grid.cells() != d.length)
        fail("plan: a document of ", d.length, " tokens on a grid of ", text_of(d));
      if (before > 0 && d.length <= before)
        fail("plan: ", to_string(spec.pattern), ": document ", number, " of row ", row, " has ", d.length,
             " tokens, none of which is behind its prefix");
      if (planar != spec.pattern.end() && d.folds())
        fail("plan: ", to_string({*planar}), " needs a grid in every document; one of row ", row, " has ", d.length,
             " tokens and no grid");
      tokens += d.length, ++number;
    }
    check(tokens <= spec.length, "plan: the documents of row ", row, " hold ", tokens, " tokens, but a row has ",
          spec.length);
  }
}

std::vector<std::int32_t> inverse_within(std::span<const std::int32_t> token_at, const DocumentList& documents,
                                         Index row) {
  std::vector<std::int32_t> position_of(token_at.size(), -1);
  std::size_t begin = 0;
  const auto judge = [&](std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::int32_t token = token_at[i];
      if (token < narrow(begin) || token >= narrow(end))
        fail_with(Code::data, "permutation: row ", row, ": position ", i, " names token ", token,
                  ", which is not among ", begin, "..", end - 1, documents.empty() ? "" : " of its document");
      if (std::int32_t& position = position_of[at(token)]; position < 0) position = narrow(i);
      else
        fail_with(Code::data, "permutation: row ", row, ": token ", token, " is at position ", position,
                  " and again at ", i);
    }
    begin = end;
  };
  for (const Document& d : documents) judge(begin + at(d.length));
  judge(token_at.size());
  return position_of;
}

std::vector<std::int32_t> given_from(const PlanSpec& spec, Index first, Index length) {
  if (spec.given.empty()) return {};
  std::vector<std::int32_t> own(spec.given.begin() + first, spec.given.begin() + first + length);
  for (std::int32_t& token : own) token -= narrow(first);
  return own;
}

std::vector<PlacedDocument> placed_documents(const PlanSpec& spec) {
  if (spec.documents.empty()) {
    Document row(spec.length);
    row.grid = spec.order.grid;
    return {{row, spec.queries, spec.given, {}}};
  }
  std::vector<PlacedDocument> out;
  std::map<std::tuple<Document, decltype(spec.queries), decltype(spec.given)>, std::size_t> known;
  for (std::size_t row = 0; row < spec.documents.size(); ++row) {
    Index first = 0;
    for (const Document& d : spec.documents[row]) {
      std::int32_t k = narrow(first), q = k;
      first += d.length;
      decltype(spec.queries) own;
      if (spec.queries) {
        const auto begin = std::ranges::lower_bound(*spec.queries, k),
                   end = std::ranges::lower_bound(*spec.queries, first);
        if (begin == end) continue;
        q = static_cast<std::int32_t>(begin - spec.queries->begin());
        for (std::int32_t& token : own.emplace(begin, end)) token -= k;
      }
      std::vector<std::int32_t> given = given_from(spec, k, d.length);
      const auto [entry, fresh] = known.try_emplace({d, own, given}, out.size());
      if (fresh) out.push_back({d, std::move(own), std::move(given), {{}, spec.documents.size() == 1}});
      out[entry->second].places.list.push_back({static_cast<std::int32_t>(row), q, k});
    }
  }
  return out;
}

// ---- a row as one part --------------------------------------------------------------------------

/// Appends a document to a row's tiling; their tiles have no pairs with each other's. `end`: of the
/// numbers on the first axis, where each document's are its own.
static void append(Tiling& row, std::int32_t& end, const Tiling& t, const Tiling::Place& place) {
  std::int32_t first = 0, last = -1;
  for (const auto* list : {&t.axis[0].key, &t.axis[0].low, &t.axis[0].high})
    for (const std::int32_t x : *list) first = std::min(first, x), last = std::max(last, x);
  const std::int32_t tiles_before = narrow(row.k_tile.size()), beyond = end - first;
  select(kQueries, row, t, nullptr, {place.q, place.k, beyond});
  select(kKeys, row, t, nullptr, {place.k, place.k, beyond});
  for (std::size_t i = 0; i < t.q_tile.size(); ++i) {
    for (const Tiling::Run& run : std::span(t.met.of(i).first, t.met.of(i).last))
      row.met.add(run.begin + tiles_before, run.end + tiles_before, run.partial);
    row.met.end_list();
  }
  for (const Tiling::Sites& s : t.grids) row.grids.push_back({s, s.first + place.k, place.k});
  row.pairs += t.pairs, end = std::max(end, last + beyond + 1);
}

static std::vector<PlanPart> made_rows(const Plan& plan) {
  std::vector<std::pair<Tiling::Place, const PlanPart*>> documents;
  for (const PlanPart& part : plan.parts())
    for (const Tiling::Place& place : part.places.list) documents.emplace_back(place, &part);
  std::ranges::sort(documents);
  std::vector<PlanPart> rows;
  for (auto first = documents.begin(), end = first; first != documents.end(); first = end) {
    end = std::ranges::find_if(first, documents.end(), [&](const auto& d) { return d.first.row != first->first.row; });
    PlanPart& row = rows.emplace_back(PlanPart{plan.length(), plan.queries()});
    if (plan.spec().documents.size() > 1) row.places = {{{first->first.row, 0, 0}}, false};
    Index tokens = 0;
    for (const auto& [place, part] : std::span(first, end)) tokens += part->length;
    for (std::size_t i = 0; i < first->second->tilings.size(); ++i) {
      Tiling& made = row.tilings.emplace_back();
      for (std::size_t a = 0; a < made.axis.size() && !first->second->tilings[i].axis[a].key.empty(); ++a)
        for (auto* list : {&made.axis[a].key, &made.axis[a].low, &made.axis[a].high}) list->reserve(at(tokens));
      for (std::int32_t numbers = 0; const auto& [place, part] : std::span(first, end))
        append(made, numbers, part->tilings[i], place);
    }
    mark_known_rows(plan, row);
  }
  return rows;
}

std::span<const PlanPart> row_parts(const Plan& plan) {
  if (plan.spec().documents.empty() || plan.parts().empty()) return plan.parts();
  return plan.parts()[0].memo.get<std::vector<PlanPart>>({}, [&] { return made_rows(plan); });
}

}  // namespace hilt
