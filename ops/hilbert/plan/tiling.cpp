// Lists of tiles, attended pairs of tiles, and entries of tilings that others take.
#include "core/error.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt {

void Tiling::Lists::add(std::int32_t first, std::int32_t end, bool is_partial) {
  (is_partial ? partial : full) += end - first;
  const bool own = std::ssize(run) > begin.back();
  if (own && run.back().end == first && run.back().partial == is_partial) run.back().end = end;
  else run.push_back({first, end, is_partial});
}

void Tiling::Lists::end_list() {
  if (std::cmp_greater(run.size(), std::numeric_limits<std::int32_t>::max()))
    fail_with(Code::memory, "plan: ", run.size(), " runs of tiles; a list can name 2147483647");
  begin.push_back(narrow(run.size()));
}

Tiling::Lists Tiling::Lists::transposed(std::size_t tiles) const {
  std::vector<std::vector<Run>> runs(tiles);
  Refs before{}, now{};  // from list to list, what is met alike goes on
  for (Index i = 0; i <= count(); ++i, before = now) {
    now = i < count() ? of(at(i)) : Refs{};
    Refs old = before, its = now;
    for (std::int32_t tile = 0, end = 0; at(tile) < tiles; tile = end) {
      end = narrow(tiles);
      const auto kind_of = [&](Refs& x) {  // 0: not met
        while (x.first != x.last && x.first->end <= tile) ++x.first;
        if (x.first == x.last) return 0;
        end = std::min(end, x.first->begin <= tile ? x.first->end : x.first->begin);
        return x.first->begin <= tile ? 1 + x.first->partial : 0;
      };
      const int was = kind_of(old), is = kind_of(its);
      for (; was != is && tile < end; ++tile) {
        if (was != 0) runs[at(tile)].back().end = narrow(i);
        if (is != 0) runs[at(tile)].push_back({narrow(i), 0, is == 2});
      }
    }
  }
  Lists out;
  for (const std::vector<Run>& its : runs) {
    for (const Run& r : its) out.add(r.begin, r.end, r.partial);
    out.end_list();
  }
  return out;
}

PairBits::Ordered::Ordered(const std::vector<std::int32_t>& of_key) : low(std::ranges::min(of_key)) {
  span = std::ranges::max(of_key) - low + 1;
  if (constexpr Index kMost = 256; span > kMost) std::ranges::sort(number = of_key);
  first.resize(number.empty() ? at(span) + 1 : of_key.size() + 1);
  for (std::size_t j = 0; j < of_key.size(); ++j) {
    const Index i = number.empty() ? of_key[j] - low : std::ranges::lower_bound(number, of_key[j]) - number.begin();
    first[at(i + 1)] |= std::uint64_t{1} << j;
  }
  for (std::size_t i = 1; i < first.size(); ++i) first[i] |= first[i - 1];
}
[[gnu::always_inline]] inline std::uint64_t PairBits::Ordered::up_to(Index high) const {
  if (!number.empty()) return first[at(std::ranges::upper_bound(number, high) - number.begin())];
  return first[at(std::max<Index>(std::min(high - low + 1, span), 0))];
}
PairBits::Keys::Keys(const Tiling& t, Index first_key, Index keys) {
  std::vector<std::int32_t> numbers(at(keys));
  const auto order = [&](const auto& list, Index step, Index box) {
    for (Index j = 0; j < keys; ++j) numbers[at(j)] = list[at((first_key + j) * step + box)];
    on.emplace_back(numbers);
  };
  while (axes < t.axis.size() && !t.axis[axes].key.empty()) ++axes;
  for (Index box = 0; box < t.boxes; ++box) {
    taken.push_back(axes > 0 ? 0 : ~std::uint64_t{0} >> (64 - keys));
    for (Index j = 0; axes > 0 && j < keys; ++j)
      taken.back() |= std::uint64_t{t.axis[0].key[at((first_key + j) * t.boxes + box)] == kTaken} << j;
    for (std::size_t axis = 0; axis < axes; ++axis) order(t.axis[axis].key, t.boxes, box);
  }
  if (t.causal) order(t.k_ranks(), 1, 0);
}
void PairBits::find(Tiling::Range q, Index first_key, Index keys, Words& words) {
  if (t_.boxes > 4 && !keys_.contains(first_key)) keys_.clear();  // of more boxes they take much memory
  const auto& [axes, on, taken] = keys_.try_emplace(first_key, t_, first_key, keys).first->second;
  const std::size_t n = at(q.end - q.begin), boxes = taken.size(), first = at(q.begin);
  std::fill_n(words.begin(), n, 0);
  for (std::size_t box = 0; box < boxes; ++box) {
    std::uint64_t any = axes > 0 ? ~std::uint64_t{0} : 0;
    Words met, passing;
    std::fill_n(met.begin(), n, any);
    for (std::size_t axis = 0; axis < axes && any != 0; ++axis) {
      const std::size_t begin = first * boxes + box;
      const std::int32_t *low = t_.axis[axis].low.data() + begin, *high = t_.axis[axis].high.data() + begin;
      const Ordered& its = on[box * axes + axis];
      std::array<std::size_t, 16> last{};  // by the end of low: neighbors ask for few intervals
      any = 0;
      for (std::size_t i = 0, row = 0; i < n; ++i, row += boxes) {
        std::size_t& alike = last[at(low[row] & 15)];
        if (i == 0 || low[alike * boxes] != low[row] || high[alike * boxes] != high[row])
          alike = i, passing[i] = its.up_to(high[row]) & ~its.up_to(Index{low[row]} - 1);
        any |= met[i] &= passing[alike];
      }
    }
    for (std::size_t i = 0; i < n; ++i) words[i] |= met[i] | taken[box];
  }
  for (std::size_t i = 0; t_.causal && i < n; ++i)
    if (words[i] != 0) words[i] &= on.back().up_to(t_.q_ranks()[first + i]);
}

Index PairBits::count(Tiling::Range q, Tiling::Range k, Index most) {
  Index n = 0;
  Words words;
  for (std::int32_t j = k.begin; j < k.end; j += 64)
    for (Tiling::Range part{q.begin, q.begin}; part.begin < q.end && n < most; part.begin = part.end) {
      part.end = std::min(q.end, part.begin + narrow(std::clamp<Index>(most, 8, Tiling::kTile)));
      find(part, j, std::min(k.end - j, 64), words);
      for (std::int32_t i = 0; i < part.end - part.begin; ++i) n += words[at(i)] ? bits_in(words[at(i)]) : 0;
    }
  return n;
}
static void add_list(TokenList& to, const TokenList& from, const TokenList& entries, std::int32_t by) {
  if (from.counts_up() && entries.counts_up() && !entries.empty() && !from.empty())
    return to.append(from[at(entries[0])] + by, entries.size());
  std::vector<std::int32_t> more(entries.size());
  std::ranges::transform(entries, more.begin(), [&](std::int32_t i) { return from[at(i)] + by; });
  to.empty() ? void(to = TokenList(std::move(more))) : to.append(TokenList(std::move(more)));
}
static void add_axis(std::vector<std::int32_t>& to, const std::vector<std::int32_t>& from, const TokenList& entries,
                     Index boxes, std::int32_t by) {
  if (from.empty()) return;
  const auto moved = [&](std::int32_t x) { return x == kTaken ? kTaken : x + by; };
  const auto n = std::ssize(entries) * boxes;
  to.resize(to.size() + at(n));
  auto out = to.end() - n;
  if (!entries.empty() && entries.counts_up())
    return void(std::transform(from.begin() + entries[0] * boxes, from.begin() + entries[0] * boxes + n, out, moved));
  if (boxes == 1) return void(std::ranges::transform(entries, out, [&](std::int32_t i) { return moved(from[at(i)]); }));
  for (const std::int32_t i : entries)
    for (Index x = i * boxes; x < (i + 1) * boxes; ++x) *out++ = moved(from[at(x)]);
}

const Side kQueries{&Tiling::q_token, &Tiling::q_name,  &Tiling::q_rank,
                    &Tiling::q_tile,  &Tiling::q_known, {&Tiling::Axis::low, &Tiling::Axis::high}};
const Side kKeys{&Tiling::k_token, &Tiling::k_name,  &Tiling::k_rank,
                 &Tiling::k_tile,  &Tiling::k_known, {&Tiling::Axis::key}};

void select(const Side& side, Tiling& to, const Tiling& from, const TokenList* some, const Moved& by) {
  const TokenList &token = from.*side.token, &name = from.*side.name;
  TokenList all;
  if (!some) all.append(0, token.size());
  const TokenList& entries = some ? *some : all;
  const auto before = narrow((to.*side.token).size());
  for (const Tiling::Range& r : from.*side.tile)
    if (!some) (to.*side.tile).push_back({before + r.begin, before + r.end});
  to.causal = from.causal, to.boxes = from.boxes;
  const bool named = !(to.*side.name).empty() || !name.empty() || by.row != by.name;
  if (named && (to.*side.name).empty()) to.*side.name = to.*side.token;
  if (named) add_list(to.*side.name, name.empty() ? token : name, entries, by.name);
  add_list(to.*side.token, token, entries, by.row);
  if (!(from.*side.rank).empty()) add_list(to.*side.rank, from.*side.rank, entries, 0);
  for (std::size_t a = 0; a < from.axis.size(); ++a)
    for (const auto list : side.on_axis)
      add_axis(to.axis[a].*list, from.axis[a].*list, entries, from.boxes, a == 0 ? by.number : 0);
}

Tiling with_lists(const Tiling& t, const Selection* queries, const Selection* keys, Tiling::Lists met) {
  Tiling out;
  for (const auto& [side, rows] : {std::pair(&kQueries, queries), std::pair(&kKeys, keys)}) {
    select(*side, out, t, rows ? &rows->entries : nullptr, {});
    out.*side->known = rows ? std::vector<std::int32_t>() : t.*side->known;
    if (!rows) continue;
    add_axis(out.*side->known, t.*side->known, rows->entries, 1, 0);
    out.*side->tile = rows->tiles;
  }
  out.grids = t.grids, out.met = std::move(met), out.pairs = t.pairs;
  return out;
}

}  // namespace hilt
