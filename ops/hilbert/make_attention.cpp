// From names and texts to orders, patterns and options; unknown keys are refused.
#include "ops/hilbert/make_attention.h"
#include <algorithm>
#include <array>
#include "core/io/text.h"

namespace hilt {

constexpr std::array<std::string_view, 7> kTypes{"standard", "improved",     "hilbert",          "block_sparse",
                                                 "ring",     "ring_hilbert", "block_sparse_ring"};
constexpr std::array<std::string_view, 23> kKeys{
    "attention_type", "segment_lengths", "dilation_rates", "order",     "dilation_mode", "causal",
    "block_size",     "blocks",          "work_order",     "dropout",   "seed",          "scale",
    "backward",       "strict",          "length",         "transport", "shards",        "heads",
    "softcap",        "alibi",           "relative",       "bias",      "sink"};

static std::vector<Index> read_list(const char* what, std::string_view text) {
  std::vector<Index> out;
  for (std::string_view part : split_text(text, ',')) out.push_back(read_index(what, part, 1));
  return out;
}

static double read_number(const char* what, std::string_view text) {
  const std::optional<double> x = number_in<double>(text);
  check(x.has_value(), what, ": '", text, "' is not a number");
  return *x;
}

static bool is_true(const char* what, std::string_view text) {
  return find_name(what, text, std::array<std::string_view, 2>{"false", "true"}) == 1;
}

NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm) {
  for (const auto& [key, value] : config) find_name("make_attention key", key, kKeys);
  const auto type = config.find("attention_type");
  check(type != config.end(),
        "make_attention: attention_type is missing; one of standard, improved, hilbert, block_sparse, ring, "
        "ring_hilbert, block_sparse_ring");
  const std::size_t kind = find_name("attention_type", type->second, kTypes);
  const bool sparse = kind == 3 || kind == 6, over_ranks = kind >= 4;

  NamedAttention a;
  a.type_ = type->second;
  if (kind == 2 || kind == 5) a.order_ = "hilbert";
  if (kind == 0 || kind == 4) a.spec_.dilation_mode = DilationMode::longnet;
  if (kind == 1) a.spec_.dilation_mode = DilationMode::head_groups;
  a.comm_ = comm;
  std::vector<Index> lengths{sparse ? 0 : 128}, rates;
  std::string size = "64", list = "local:1";
  TermConfig terms;
  Index heads = 0;  // of what is learned
  for (const auto& [key, value] : config) {
    const bool of_blocks = key == "block_size" || key == "blocks" || key == "work_order";
    const bool of_segments = key == "segment_lengths" || key == "dilation_rates" || key == "dilation_mode";
    const bool of_ranks = key == "length" || key == "transport" || key == "shards";
    const bool unread = (of_ranks && !over_ranks) || (of_blocks && !sparse) || (of_segments && sparse);
    check(!unread, "make_attention: ", a.type_, " does not read ", key);
    if (key == "segment_lengths") lengths = read_list("segment_lengths", value);
    else if (key == "dilation_rates") rates = read_list("dilation_rates", value);
    else if (key == "order") a.order_ = value;
    else if (key == "dilation_mode") a.spec_.dilation_mode = parse_dilation_mode(value);
    else if (key == "causal") a.spec_.causality = parse_causality(value);
    else if (key == "block_size") size = std::to_string(read_index("block_size", value, 1));
    else if (key == "blocks") list = value;
    else if (key == "work_order") a.spec_.work_order = parse_work_order(value);
    else if (key == "dropout") a.options_.dropout = read_number("dropout", value);
    else if (key == "seed") a.seed_ = static_cast<std::uint64_t>(read_index("seed", value, 0));
    else if (key == "scale") a.options_.scale = read_number("scale", value);
    else if (key == "backward") a.options_.backward = parse_backward(value);
    else if (key == "strict") a.options_.strict = is_true("strict", value);
    else if (key == "length") a.length_ = read_index("length", value, 1);
    else if (key == "transport") a.transport_ = parse_transport(value);
    else if (key == "shards") a.dealing_ = parse_dealing(value);
    else if (key == "heads") heads = read_index("heads", value, 1);
    else if (key == "softcap") terms.softcap = read_number("softcap", value);
    else if (key == "sink") terms.sink = is_true("sink", value);
    else if (key == "alibi" || key == "relative" || key == "bias") read_term(terms, key, value);
  }
  check(!terms.learns() || heads > 0, "make_attention: a term that is learned needs heads, how many q will have");
  a.options_.terms = make_terms(terms, heads, a.length_);
  check(!a.options_.terms.bias || a.options_.terms.bias.numel() > 0,
        "make_attention: bias: L is for the types that read length; write a number");
  check(!over_ranks || a.length_ > 0, "make_attention: ", a.type_, " needs length, the tokens of all ranks together");
  if (sparse) {
    if (list.starts_with("dilated")) std::ranges::replace(list, '+', '/');  // as configurations write it
    a.spec_.pattern = parse_pattern("blocks:" + size + "@" + list);
    check(!over_ranks || !a.spec_.pattern[0].looks_at_data(), "make_attention: blocks = ", list,
          " compares the queries of all ranks; name another builder");
    return a;
  }
  if (kind == 4 && !config.contains("segment_lengths")) return a;
  if (rates.empty()) rates.assign(lengths.size(), 1);
  check(lengths.size() == rates.size(), "make_attention: ", lengths.size(), " segment_lengths and ", rates.size(),
        " dilation_rates must pair up");
  a.spec_.pattern.clear();
  for (std::size_t i = 0; i < lengths.size(); ++i)
    a.spec_.pattern.push_back({.kind = Branch::Kind::segment, .size = lengths[i], .dilation = rates[i]});
  return a;
}

PlanSpec NamedAttention::spec(Index length, Index heads, const Documents& documents) const {
  PlanSpec spec = spec_;
  spec.length = length, spec.heads = heads, spec.order = parse_order(order_, length), spec.documents = documents;
  return spec;
}

PlanPtr NamedAttention::plan(const Tensor& q, const Documents& documents) const {
  check(q.rank() == 4, "attention: q must be [batch, length, heads, dim], got ", q.shape());
  return make_plan(spec(q.dim(1), q.dim(2), documents));
}

ShardPlanPtr NamedAttention::shard(Index heads, const Documents& documents) const {
  check(length_ > 0, "make_attention: ", type_, " is not divided over ranks");
  return make_shard_plan(spec(length_, heads, documents), comm_.size(), comm_.rank(), transport_, dealing_);
}

Tensor NamedAttention::operator()(const Tensor& q, const Tensor& k, const Tensor& v, std::uint64_t step,
                                  const Documents& documents) const {
  AttentionOptions options = options_;
  if (options.dropout > 0) options.key = RandomKey{seed_, step};
  check(q.rank() == 4, "attention: q must be [batch, rows, heads, dim], got ", q.shape());
  options.terms = fitted_terms(options.terms, q.dtype(), length_ > 0 ? length_ : q.dim(1));
  if (length_ > 0) return ring_attention(q, k, v, shard(q.dim(2), documents), comm_, options);
  return attention(q, k, v, plan(q, documents), options);
}

void NamedAttention::visit_parameters(const std::string& at,
                                      const std::function<void(const std::string&, Tensor&)>& visit) {
  visit_terms(options_.terms,
              [&](const std::string& name, Tensor& x) { visit(at.empty() ? name : at + '.' + name, x); });
}

}  // namespace hilt
