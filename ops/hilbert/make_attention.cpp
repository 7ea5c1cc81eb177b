// From names and texts to orders, patterns and options; unknown keys are refused.
#include "ops/hilbert/make_attention.h"
#include "core/io/text.h"

namespace hilt {
namespace {

using S = AttentionSettings;
using Reader = AttentionSetting::Reader;

/// All names of an enumeration, up to the last one's.
template <class E> std::vector<std::string_view> names_to(E last) {
  std::vector<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(last); ++i) names.push_back(name_of(static_cast<E>(i)));
  return names;
}
template <class... Names> std::vector<std::string_view> list(Names... names) { return {names...}; }

std::vector<Index> read_list(const char* what, std::string_view text) {
  std::vector<Index> out;
  for (std::string_view part : split_text(text, ',')) out.push_back(read_index(what, part, 1));
  return out;
}

}  // namespace

const std::vector<AttentionSetting>& attention_settings() {
  using enum AttentionSetting::Reader;
  static const std::vector<AttentionSetting> rows{
      {"attention_type", "NAME", &S::attention_type, all, "Which attention it is, by the name that people know", "", 0,
       0, list("standard", "improved", "hilbert", "block_sparse", "ring", "ring_hilbert", "block_sparse_ring")},
      {"order", "ORDER", &S::order, all,
       "row, snake, morton, tiles or hilbert, which fold a sequence; hilbert:HxW, hilbert:TxHxW, row:TxHxW, "
       "tiles:HxW/hxw; suffix ,scope=segment or ,chunk=N; auto, auto:HxW or auto:TxHxW: the one with the fewest tiles "
       "among those that leave the set unchanged"},
      {"pattern", "PATTERN", &S::pattern, none,
       "dense, segment:W[,dilation=R][,offset=O], slide:R, neighborhood:K, window2d:HxW, slide2d:RYxRX, "
       "neighborhood2d:KYxKX, window3d:TxHxW, slide3d:RTxRYxRX, neighborhood3d:KTxKYxKX, blocks:SIZE@LIST; suffixes "
       ",shift=S (segments, windows), ,tail=borrow (segments), ,dilation=D ,stride=S (slides, neighborhoods), "
       ",causal=1x0 (all but segments), one number or one an axis; A|B is a union, A+B merges; ,prefix=N at the end: "
       "the first N tokens, outside the grid, meet all. LIST: FILE.npy, local:RADIUS, dilated:R/R/.., "
       "global_local:GLOBAL:RADIUS or top:K"},
      {"segment_lengths", "N,N,..", &S::segment_lengths, segments, "Tokens of a segment, for each branch"},
      {"dilation_rates", "N,N,..", &S::dilation_rates, segments, "Dilation, for each branch"},
      {"dilation_mode", "NAME", &S::dilation_mode, segments, "Who asks where a segment is dilated", "", 0, 0,
       names_to(DilationMode::residue)},
      {"causal", "NAME", &S::causal, all, "Which keys are in the past: of a token, or along the curve", "", 0, 0,
       names_to(Causality::curve)},
      {"block_size", "N", &S::block_size, blocks, "Side of a block, in tokens", "", 1},
      {"blocks", "LIST", &S::blocks, blocks,
       "local:RADIUS, dilated:R+R+.., global_local:GLOBAL:RADIUS, FILE.npy or top:K"},
      {"work_order", "NAME", &S::work_order, blocks, "The order in which a kernel takes blocks", "", 0, 0,
       names_to(WorkOrder::automatic)},
      {"documents", "LIST", &S::documents, none,
       "What lies in each row, one after the other: lengths or grids, like 100,16x16,4x6x6; attend also takes lists "
       "joined by /, one a row of the batch"},
      {"queries", "FIRST:COUNT", &S::queries, none,
       "Which tokens q and d_o hold, a run or a list like 0,5,9:4 (default: the last ones); o, lse and dq have as "
       "many rows"},
      {"scale", "X", &S::scale, all, "Factor of q . k (default 1 / sqrt(D))", "", -1e300, 1e300},
      {"softcap", "X", &S::softcap, terms, "Scores z become X tanh(z / X); 0 does not cap", "", 0, 1e30},
      {"alibi", "published|learned", &S::alibi, terms, "Scores lose slope times distance",
       "Scores lose slope times distance; slopes [H] from a file, or the published ones"},
      {"relative", "SIZES", &S::relative, terms,
       "A learned table is added by offset: 2 R + 1 of tokens, or such a number for each axis of the grid, like 17x17",
       "Added by offset: [H, 2 R + 1] of tokens, [H, 2 RY + 1, 2 RX + 1] or three axes of the order's grid"},
      {"bias", "SIZES", &S::bias, terms, "A learned bias, like 1x4x1xL: sequences, heads, queries, keys; L is all",
       "Added to scores; broadcasts to [B, H, L, L], by tokens; -inf masks"},
      {"sink", "", &S::sink, terms, "A learned score a head beside every row's, with value 0",
       "[H]: a score beside every row's, with value 0"},
      {"heads", "N", &S::heads, all, "How many q has, where a term is learned", "", 1},
      {"backward", "NAME", &S::backward, all, "How gradients are obtained", "", 0, 0, names_to(Backward::fused)},
      {"strict", "", &S::strict, all, "A fallback to another backward is an error"},
      {"dropout", "X", &S::dropout, all, "Probability of dropping a weight, in forward and backward alike", "", 0,
       0.99},
      {"seed", "N", &S::seed, all, "Of dropout", "", 0, 0x1p53},
      {"length", "N", &S::length, ranks, "Tokens of all ranks together", "", 1},
      {"transport", "NAME", &S::transport, ranks,
       "Rows of other ranks one rank after the other, under way while computing; or all at once", "", 0, 0,
       names_to(Transport::gather)},
      {"shards", "NAME", &S::shards, ranks,
       "One run of positions a rank, several chosen to even out the work, or whichever is worth it", "", 0, 0,
       list("contiguous", "balanced", "auto")},
  };
  return rows;
}

const AttentionSetting& attention_setting(std::string_view name) {
  std::vector<std::string_view> names;
  for (const AttentionSetting& s : attention_settings()) names.push_back(s.name);
  return attention_settings()[find_name("make_attention key", name, names)];
}

void read_setting(AttentionSettings& settings, std::string_view name, std::string_view text) {
  const AttentionSetting& s = attention_setting(name);
  const std::string what(name);
  if (!s.choices.empty()) (void)find_name(what.c_str(), text, s.choices);
  std::visit(
      [&](auto field) {
        auto& value = settings.*field;
        using T = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>) value = text;
        else if constexpr (std::is_same_v<T, bool>)
          value = find_name(what.c_str(), text, std::array<std::string_view, 2>{"false", "true"}) == 1;
        else if constexpr (std::is_same_v<T, Index>) value = read_index(what.c_str(), text, static_cast<Index>(s.low));
        else {
          const std::optional<double> x = number_in<double>(text);
          check(x.has_value(), what, ": '", text, "' is not a number");
          value = *x;
        }
      },
      s.field);
}

PlanSpec plan_spec(const AttentionSettings& s, Index length, Index heads) {
  Pattern pattern = parse_pattern(s.pattern);
  PlanSpec spec{.length = length,
                .heads = heads,
                .order = parse_order(s.order, behind_prefix(pattern, length)),
                .pattern = std::move(pattern),
                .dilation_mode = parse_dilation_mode(s.dilation_mode),
                .causality = parse_causality(s.causal),
                .work_order = parse_work_order(s.work_order)};
  if (!s.documents.empty()) spec.documents = parse_documents(s.documents);
  return spec;
}

AttentionOptions attention_options(const AttentionSettings& s) {
  return {.backward = parse_backward(s.backward),
          .scale = s.scale,
          .dropout = s.dropout,
          .key = RandomKey{static_cast<std::uint64_t>(s.seed), 0},
          .strict = s.strict};
}

TermConfig term_config(const AttentionSettings& s) {
  TermConfig terms{.softcap = s.softcap, .sink = s.sink};
  for (const auto& [name, text] : {std::pair("alibi", s.alibi), {"relative", s.relative}, {"bias", s.bias}})
    if (!text.empty()) read_term(terms, name, text);
  return terms;
}

NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm) {
  NamedAttention a;
  AttentionSettings& s = a.settings_;
  for (const auto& [key, value] : config) read_setting(s, key, value);
  const std::size_t kind = find_name("attention_type", s.attention_type, attention_setting("attention_type").choices);
  const bool sparse = kind == 3 || kind == 6, over_ranks = kind >= 4, curve = kind == 2 || kind == 5;
  for (const auto& [key, value] : config) {
    const Reader reader = attention_setting(key).reader;
    const bool reads = reader == Reader::all || reader == Reader::terms || (reader == Reader::ranks && over_ranks) ||
                       (reader == Reader::blocks && sparse) || (reader == Reader::segments && !sparse);
    check(reads, "make_attention: ", s.attention_type, " does not read ", key);
  }
  if (!config.contains("order")) s.order = curve ? "hilbert" : "row";
  if (!config.contains("dilation_mode") && !curve && !sparse)
    s.dilation_mode = name_of(kind == 1 ? DilationMode::head_groups : DilationMode::longnet);
  const TermConfig terms = term_config(s);
  check(!terms.learns() || s.heads > 0, "make_attention: a term that is learned needs heads, how many q will have");
  check(!over_ranks || s.length > 0, "make_attention: ", s.attention_type,
        " needs length, the tokens of all ranks together");
  if (sparse) {
    if (s.blocks.starts_with("dilated")) std::ranges::replace(s.blocks, '+', '/');  // as configurations write it
    s.pattern = "blocks:" + std::to_string(s.block_size) + "@" + s.blocks;
  } else if (kind != 4 || config.contains("segment_lengths")) {
    const std::vector<Index> lengths =
        s.segment_lengths.empty() ? std::vector<Index>{128} : read_list("segment_lengths", s.segment_lengths);
    std::vector<Index> rates(lengths.size(), 1);
    if (!s.dilation_rates.empty()) rates = read_list("dilation_rates", s.dilation_rates);
    check(lengths.size() == rates.size(), "make_attention: ", lengths.size(), " segment_lengths and ", rates.size(),
          " dilation_rates must pair up");
    Pattern branches;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      branches.push_back({.kind = Branch::Kind::segment, .size = lengths[i], .dilation = rates[i]});
    s.pattern = to_string(branches);
  }
  AttentionSettings any_length = s;
  any_length.order = "row";
  a.spec_ = plan_spec(any_length, 1, 1);
  check(!over_ranks || !a.spec_.pattern[0].looks_at_data(), "make_attention: blocks = ", s.blocks,
        " compares the queries of all ranks; name another builder");
  a.options_ = attention_options(s);
  a.options_.terms = make_terms(terms, s.heads, s.length);
  check(!a.options_.terms.bias || a.options_.terms.bias.numel() > 0,
        "make_attention: bias: L is for the types that read length; write a number");
  a.comm_ = comm;
  return a;
}

PlanSpec NamedAttention::spec(Index length, Index heads, const Documents& documents) const {
  PlanSpec spec = spec_;
  spec.length = length, spec.heads = heads, spec.order = parse_order(settings_.order, length),
  spec.documents = documents;
  return spec;
}

PlanPtr NamedAttention::plan(const Tensor& q, const Documents& documents) const {
  check(q.rank() == 4, "attention: q must be [batch, length, heads, dim], got ", q.shape());
  return make_plan(spec(q.dim(1), q.dim(2), documents));
}

ShardPlanPtr NamedAttention::shard(Index heads, const Documents& documents) const {
  check(settings_.length > 0, "make_attention: ", type(), " is not divided over ranks");
  return make_shard_plan(spec(settings_.length, heads, documents), comm_.size(), comm_.rank(),
                         parse_transport(settings_.transport), parse_dealing(settings_.shards));
}

Tensor NamedAttention::operator()(const Tensor& q, const Tensor& k, const Tensor& v, std::uint64_t step,
                                  const Documents& documents) const {
  AttentionOptions options = options_;
  if (options.dropout > 0) options.key = RandomKey{static_cast<std::uint64_t>(settings_.seed), step};
  check(q.rank() == 4, "attention: q must be [batch, rows, heads, dim], got ", q.shape());
  options.terms = fitted_terms(options.terms, q.dtype(), settings_.length > 0 ? settings_.length : q.dim(1));
  if (settings_.length > 0) return ring_attention(q, k, v, shard(q.dim(2), documents), comm_, options);
  return attention(q, k, v, plan(q, documents), options);
}

void NamedAttention::visit_parameters(const std::string& at,
                                      const std::function<void(const std::string&, Tensor&)>& visit) {
  visit_terms(options_.terms,
              [&](const std::string& name, Tensor& x) { visit(at.empty() ? name : at + '.' + name, x); });
}

}  // namespace hilt
