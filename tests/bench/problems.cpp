// The draw of attention problems, their text, and the least time they can take.
#include "tests/bench/problems.h"
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <sstream>
#include "core/error.h"
#include "core/random.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/ops.h"

namespace hilt::bench {
namespace {

class Rng {
 public:
  Rng(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}
  double uniform() {  // [0, 1)
    const auto x =
        philox({next_++, 0, static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)}, seed_);
    return x[0] * 0x1p-32;
  }
  Index below(Index n) { return static_cast<Index>(uniform() * static_cast<double>(n)); }
  bool chance(double p) { return uniform() < p; }
  template <class X> X pick(std::initializer_list<X> from) {
    return *(from.begin() + below(static_cast<Index>(from.size())));
  }
  Index log_uniform(double low, double high) {
    return static_cast<Index>(std::lround(low * std::pow(high / low, uniform())));
  }

 private:
  std::uint64_t seed_, stream_;
  std::uint32_t next_ = 0;
};

std::string text_of(Index i) { return std::to_string(i); }
std::string sides(Index a, Index b) { return text_of(a) + "x" + text_of(b); }
Index odd(Index i) { return i | 1; }

/// Half as drawn, a quarter to multiples of 64, a quarter to powers of two.
Index round_some(Rng& r, Index n) {
  const double u = r.uniform();
  if (u < 0.5) return n;
  if (u < 0.75) return std::max<Index>(64, n / 64 * 64);
  return static_cast<Index>(std::bit_floor(static_cast<std::uint64_t>(n)));
}
Index segment_size(Rng& r) { return r.chance(0.5) ? Index{32} << r.below(8) : r.log_uniform(17, 3000); }
std::string segment(Rng& r, bool dilated) {
  const Index size = segment_size(r);
  if (!dilated) return "segment:" + text_of(size);
  const Index dilation = std::min(r.pick<Index>({2, 2, 3, 4, 4, 8, 16, 64}), size);
  std::string text = "segment:" + text_of(size) + ",dilation=" + text_of(dilation);
  if (r.chance(0.25)) text += ",offset=head";
  return text;
}

enum Family {
  kDense,
  kSegment,
  kDilated,
  kSlide,
  kNeighborhood,
  kWindow2d,
  kSlide2d,
  kNeighborhood2d,
  kBlocks,
  kBranches,
  kSpace,
  kUnion
};
constexpr Index kFamilies = 12, kBaseFamilies = 10;

std::string pattern_of(Rng& r, Family family, Index length) {
  switch (family) {
    case kDense: return "dense";
    case kSegment: return segment(r, false);
    case kDilated: return segment(r, true);
    case kSlide: return "slide:" + text_of(r.log_uniform(8, 1024));
    case kNeighborhood: return "neighborhood:" + text_of(std::min(odd(r.log_uniform(15, 2048)), (length - 1) | 1));
    case kWindow2d: {
      const Index side = r.pick<Index>({4, 7, 8, 8, 12, 14, 16, 16, 24, 32});
      return "window2d:" + sides(side, r.chance(0.75) ? side : 2 * side);
    }
    case kSlide2d: {
      const Index radius = r.pick<Index>({1, 2, 3, 4, 6, 8, 12, 16});
      return "slide2d:" + sides(radius, r.chance(0.75) ? radius : (radius + 1) / 2);
    }
    case kNeighborhood2d: {
      const Index side = r.pick<Index>({3, 5, 7, 7, 9, 13, 17, 25, 33});
      return "neighborhood2d:" + sides(side, r.chance(0.75) ? side : odd(side / 2));
    }
    case kBlocks: {
      const Index size = std::max(r.pick<Index>({32, 64, 64, 100, 128, 128, 256}), (length + 4095) / 4096);
      const std::string head = "blocks:" + text_of(size) + "@";
      switch (r.below(3)) {
        case 0: return head + "local:" + text_of(1 + r.below(4));
        case 1: return head + "dilated:1/" + text_of(2 + r.below(3)) + "/" + text_of(6 + r.below(20));
        default: return head + "global_local:" + text_of(1 + r.below(2)) + ":" + text_of(1 + r.below(3));
      }
    }
    case kSpace: {
      const Index side = r.pick<Index>({5, 7, 9});
      const std::string sizes = text_of(r.pick<Index>({3, 5})) + "x" + sides(side, side);
      return r.pick({"window3d:", "neighborhood3d:"}) + sizes;
    }
    case kUnion: return "slide:" + text_of(r.log_uniform(16, 256)) + "|segment:" + text_of(Index{64} << r.below(4));
    default: {
      const Index size = Index{64} << r.below(4);
      return "segment:" + text_of(size) + "+segment:" + text_of(4 * size) + ",dilation=4" +
             (r.chance(0.5) ? "+segment:" + text_of(16 * size) + ",dilation=16" : "");
    }
  }
}

/// Keys of a query, about: what the size of a problem is chosen by.
double keys_of(const Problem& p) {
  const PlanSpec spec = spec_of(p);
  const auto length = static_cast<double>(p.length);
  double keys = 0;
  for (const Branch& b : spec.pattern) {
    double n = length;
    const auto size = static_cast<double>(b.size), cells = static_cast<double>(b.rows * b.columns);
    switch (b.kind) {
      case Branch::Kind::dense: break;
      case Branch::Kind::segment: n = size / static_cast<double>(b.dilation); break;
      case Branch::Kind::slide: n = 2 * size + 128; break;
      case Branch::Kind::neighborhood: n = size + 128; break;
      case Branch::Kind::window2d: n = 2 * cells; break;
      case Branch::Kind::slide2d: n = 8 * cells + 256; break;
      case Branch::Kind::neighborhood2d: n = 2 * cells + 256; break;
      case Branch::Kind::window3d: n = 2 * cells * static_cast<double>(b.frames); break;
      case Branch::Kind::slide3d:
      case Branch::Kind::neighborhood3d: n = 3 * cells * static_cast<double>(b.frames) + 256; break;
      case Branch::Kind::blocks: n = static_cast<double>(b.pairs.size()) * size * size / length; break;
    }
    keys += std::min(n, length);
  }
  return spec.causality == Causality::none ? keys : keys / 2;
}

/// What `--only base` leaves out.
void draw_more(Rng& r, Family family, bool planar, Problem& p) {
  if (r.chance(0.25)) p.dropout = r.pick({0.1, 0.2, 0.5});
  if (r.chance(0.1)) p.softcap = r.pick({15.0, 30.0, 50.0});
  if (r.chance(0.1)) p.sink = true;
  switch (r.below(10)) {
    case 0: p.alibi = r.pick({"published", "learned"}); break;
    case 1:
      p.relative = planar ? sides(2 * r.below(16) + 3, 2 * r.below(16) + 3) : text_of(2 * r.below(256) + 17);
      break;
    case 2: p.bias = r.pick({"1x1x1xL", "1xHx1xL", "1xHxLx1"}); break;
    default: break;
  }
  if (const std::size_t h = p.bias.find('H'); h != p.bias.npos) p.bias.replace(h, 1, text_of(p.heads));
  const bool plain = p.order.find(':') == p.order.npos && p.order.find(',') == p.order.npos;
  if (plain && p.order != "tiles" && family != kBlocks && family != kBranches && r.chance(0.3)) {
    for (Index left = p.length; left > 0;) {
      const Index n = std::min(left, r.log_uniform(33, 4096));
      p.documents += (p.documents.empty() ? "" : ",") + text_of(n), left -= n;
    }
  } else if (p.bias.empty() && r.chance(0.1)) {
    p.queries = std::max<Index>(1, r.log_uniform(1, static_cast<double>(p.length)));
  }
}

Problem drawn_once(Rng& r, Family family, bool base, const Machine& machine) {
  Problem p;
  const bool planar = family >= kWindow2d && family <= kNeighborhood2d;
  const char* const kind = r.pick({"hilbert", "hilbert", "hilbert", "row", "row", "morton", "snake", "tiles"});
  p.length = round_some(r, r.log_uniform(500, 262144));
  p.order = kind;
  if (family == kSpace) {
    const Index frames = r.pick<Index>({8, 12, 16}),
                side = std::max<Index>(10, std::lround(std::sqrt(p.length / frames)));
    p.length = frames * side * side;
    p.order = std::string(r.pick({"hilbert:", "row:"})) + text_of(frames) + "x" + sides(side, side);
  } else if (planar || r.chance(0.2)) {  // a grid, up to 2.5 times as wide as it is high
    const double ratio = r.chance(0.5) ? 1 : std::exp(r.uniform() * 0.9);
    const Index height = std::max<Index>(8, std::lround(std::sqrt(static_cast<double>(p.length) / ratio)));
    const Index width = std::max<Index>(8, p.length / height);
    p.length = height * width;
    p.order += ":" + sides(height, width) + (p.order == "tiles" ? "/8x16" : "");
  } else if (p.order == "tiles") {
    p.order += ":8x16";
  }
  p.pattern = pattern_of(r, family, p.length);
  if (r.chance(1.0 / 3)) p.causal = r.chance(0.8) ? "token" : "curve";
  if (family == kBranches || family == kDilated)
    p.dilation_mode = r.pick({"all_queries", "all_queries", "longnet", "head_groups", "residue"});
  if (family == kSegment && p.order.find(':') == std::string::npos && r.chance(0.2)) p.order += ",scope=segment";
  p.dim = r.pick<Index>({64, 64, 64, 128, 128, 128, 16, 32, 48, 80, 96, 112, 160, 192, 256});
  p.dtype = r.pick({"bf16", "bf16", "bf16", "f16", "f16"});
  p.heads = r.pick<Index>({1, 2, 4, 6, 8, 8, 12, 16, 16, 24, 32});
  if (p.dilation_mode == "head_groups") p.heads = std::max<Index>(p.heads, 4);
  p.kv_heads = p.heads;
  if (r.chance(0.3))
    for (const Index share : {8, 4, 3, 2})
      if (p.heads % share == 0 && r.chance(0.5)) p.kv_heads = p.heads / share;
  if (!base) draw_more(r, family, planar, p);
  // As many in a batch as make the work.
  const double rows = static_cast<double>(p.length * p.heads), dim = static_cast<double>(p.dim);
  const double one = 1e3 * std::max({4 * rows * dim * machine.element / machine.bytes,
                                     4 * rows * keys_of(p) * dim / machine.flops, rows * keys_of(p) / machine.exps});
  const double wanted = machine.low_ms * std::pow(machine.high_ms / machine.low_ms, r.uniform());
  p.batch = std::clamp<Index>(std::lround(wanted / one), 1, 64);
  const double ms = one * static_cast<double>(p.batch);
  return ms >= machine.low_ms && ms <= machine.high_ms ? p : Problem{};
}

BlockPairs block_pairs(std::string_view how, Index n) {
  const auto number = [&](std::string_view text) { return static_cast<Index>(std::stoll(std::string(text))); };
  std::vector<Index> numbers;
  for (std::size_t i = how.find(':'); i != how.npos; i = how.find_first_of(":/", i + 1))
    numbers.push_back(number(how.substr(i + 1)));
  if (how.starts_with("local:")) return local_blocks(n, numbers.at(0));
  if (how.starts_with("dilated:")) return dilated_blocks(n, numbers);
  if (how.starts_with("global_local:")) return global_local_blocks(n, numbers.at(0), numbers.at(1));
  fail("blocks (", how, "): local:R, dilated:R/R or global_local:G:R");
}

}  // namespace

Problem drawn(std::uint64_t seed, std::uint64_t i, bool base, const Machine& machine) {
  Rng r(seed, i);
  const auto family = static_cast<Family>(r.below(base ? kBaseFamilies : kFamilies));
  Problem p;
  while (p.length == 0) p = drawn_once(r, family, base, machine);  // what falls outside is drawn again
  return p;
}

std::string to_string(const Problem& p) {
  std::ostringstream os;
  os << "--batch " << p.batch << " --length " << p.length << " --heads " << p.heads << " --kv-heads " << p.kv_heads
     << " --head-dim " << p.dim << " --order " << p.order << " --pattern " << p.pattern << " --dilation-mode "
     << p.dilation_mode << " --causal " << p.causal << " --dtype " << p.dtype;
  if (p.dropout > 0) os << " --dropout " << p.dropout;
  if (p.softcap > 0) os << " --softcap " << p.softcap;
  if (p.alibi != "none") os << " --alibi " << p.alibi;
  if (!p.relative.empty()) os << " --relative " << p.relative;
  if (!p.bias.empty()) os << " --bias " << p.bias;
  if (p.sink) os << " --sink learned";
  if (!p.documents.empty()) os << " --documents " << p.documents;
  if (p.queries > 0) os << " --queries " << p.length - p.queries << ':' << p.queries;
  return os.str();
}

Problem parse_problem(std::string_view line) {
  constexpr std::string_view kKey = "\"problem\": \"";
  if (const std::size_t at = line.find(kKey); at != line.npos) {
    line.remove_prefix(at + kKey.size());
    line = line.substr(0, line.find('"'));
  }
  Problem p;
  std::istringstream in{std::string(line)};
  std::string option, value;
  p.kv_heads = 0;
  while (in >> option) {
    check(static_cast<bool>(in >> value), "problem: ", option, " has no value");
    const auto number = [&] { return static_cast<Index>(std::stoll(value)); };
    if (option == "--batch") p.batch = number();
    else if (option == "--length") p.length = number();
    else if (option == "--heads") p.heads = number();
    else if (option == "--kv-heads") p.kv_heads = number();
    else if (option == "--head-dim") p.dim = number();
    else if (option == "--order") p.order = value;
    else if (option == "--pattern") p.pattern = value;
    else if (option == "--dilation-mode") p.dilation_mode = value;
    else if (option == "--causal") p.causal = value;
    else if (option == "--dtype") p.dtype = value;
    else if (option == "--dropout") p.dropout = std::stod(value);
    else if (option == "--softcap") p.softcap = std::stod(value);
    else if (option == "--alibi") p.alibi = value;
    else if (option == "--relative") p.relative = value;
    else if (option == "--bias") p.bias = value;
    else if (option == "--sink") p.sink = true;
    else if (option == "--documents") p.documents = value;
    else if (option == "--queries") p.queries = std::stoll(value.substr(value.find(':') + 1));
    else fail("problem (", option, "): no such option here");
  }
  if (p.kv_heads == 0) p.kv_heads = p.heads;
  return p;
}

std::vector<Problem> read_problems(const std::string& path) {
  std::ifstream in(path);
  check(static_cast<bool>(in), "problems (", path, "): cannot be read");
  std::vector<Problem> out;
  for (std::string line; std::getline(in, line);)
    if (line.find("--length") != line.npos) out.push_back(parse_problem(line));
  return out;
}

PlanSpec spec_of(const Problem& p) {
  PlanSpec spec;
  spec.length = p.length, spec.heads = p.heads, spec.order = parse_order(p.order, p.length);
  const std::size_t builder = p.pattern.find('@');
  if (p.pattern.starts_with("blocks:") && !p.pattern.ends_with(".npy") && builder != p.pattern.npos) {
    const Index size = std::stoll(p.pattern.substr(7));
    spec.pattern = {
        blocks(size, block_pairs(std::string_view(p.pattern).substr(builder + 1), (p.length + size - 1) / size))};
  } else {
    spec.pattern = parse_pattern(p.pattern);
  }
  spec.dilation_mode = parse_dilation_mode(p.dilation_mode), spec.causality = parse_causality(p.causal);
  if (!p.documents.empty()) spec.documents = parse_documents(p.documents);
  if (p.queries > 0) spec.queries = query_run(p.length - p.queries, p.queries);
  return spec;
}

ScoreTerms terms_of(const Problem& p, std::uint64_t stream, Device device) {
  TermConfig config;
  config.softcap = p.softcap, config.sink = p.sink;
  for (const auto& [name, text] : {std::pair{"alibi", p.alibi}, {"relative", p.relative}, {"bias", p.bias}})
    if (!text.empty()) read_term(config, name, text);
  ScoreTerms terms = make_terms(config, p.heads, p.length, DType::f32);
  visit_terms(terms, [&](const std::string& name, Tensor& x) {
    x = name == "slopes" ? moved(x, device) : mul(randn(x.shape(), {stream, 9}, DType::f32, device), 0.3);
  });
  return terms;
}

// ---- the floor ----------------------------------------------------------------------------------

namespace {

Cells cells_of(const Tiling& t) {
  constexpr std::int32_t kCell = 64;
  Cells out;
  const auto any = [&](Tiling::Range q, Tiling::Range k) {
    for (std::int32_t i = q.begin; i < q.end; ++i)
      for (std::int32_t j = k.begin; j < k.end; ++j)
        if (attends(t, static_cast<std::size_t>(i), static_cast<std::size_t>(j))) return true;
    return false;
  };
  for (std::size_t tile = 0; tile < t.q_tile.size(); ++tile)
    for (const Tiling::Ref ref : t.met.of(tile)) {
      const Tiling::Range q = t.q_tile[tile], k = t.k_tile[static_cast<std::size_t>(ref.tile)];
      for (std::int32_t i = q.begin; i < q.end; i += kCell)
        for (std::int32_t j = k.begin; j < k.end; j += kCell) {
          const Tiling::Range rows{i, std::min(i + kCell, q.end)}, columns{j, std::min(j + kCell, k.end)};
          if (ref.partial && !any(rows, columns)) continue;
          ++out.cells, out.pairs += Index{rows.end - rows.begin} * (columns.end - columns.begin);
        }
    }
  return out;
}

}  // namespace

Cells touched_cells(const Plan& plan) {
  Cells sum;
  for (const PlanPart& part : plan.parts()) {
    std::vector<Cells> each;
    for (const Tiling& t : part.tilings) each.push_back(cells_of(t));
    for (Index h = 0; h < plan.heads(); ++h)
      for (const std::int32_t i : plan.tilings_of(h)) {
        const Cells& its = each[static_cast<std::size_t>(i)];
        sum.cells += part.places.count(1) * its.cells, sum.pairs += part.places.count(1) * its.pairs;
      }
  }
  return sum;
}

Floor floor_of(const Problem& p, const Plan& plan, const Cells& cells, const Machine& m, double read_rate) {
  // Rows that somebody needs, of all heads; what is written is written whole.
  double queries = 0, keys = 0;
  for (const PlanPart& part : plan.parts())
    for (Index h = 0; h < plan.heads(); ++h) {
      std::vector<bool> asks(static_cast<std::size_t>(p.length)), asked(asks);
      for (const std::int32_t i : plan.tilings_of(h)) {
        const Tiling& t = part.tilings[static_cast<std::size_t>(i)];
        for (const std::int32_t token : t.q_token) asks[static_cast<std::size_t>(token)] = true;
        for (const std::int32_t token : t.k_token) asked[static_cast<std::size_t>(token)] = true;
      }
      queries += static_cast<double>(part.places.count(1) * std::ranges::count(asks, true));
      keys += static_cast<double>(part.places.count(1) * std::ranges::count(asked, true));
    }
  const auto batch = static_cast<double>(p.batch), dim = static_cast<double>(p.dim), e = m.element;
  const double all = static_cast<double>(p.length * p.heads);
  const double out = static_cast<double>((p.queries > 0 ? p.queries : p.length) * p.heads);  // rows of o and dq
  const double grouped = static_cast<double>(p.kv_heads) / static_cast<double>(p.heads);  // of keys, and rows of keys
  const double pairs = batch * static_cast<double>(cells.pairs);
  const auto ms = [&](double read, double written, double products) {
    const double bytes = batch * dim * e * (read + written);
    return 1e3 *
           std::max({bytes / (written > 0 ? m.bytes : read_rate), products * pairs * dim / m.flops, pairs / m.exps});
  };
  return {ms(queries + 2 * keys * grouped, out, 4), ms(3 * queries + 2 * keys * grouped, out + 2 * all * grouped, 10)};
}

}  // namespace hilt::bench
