// From a configuration of names and texts to orders, patterns and options; unknown keys are
// refused.
#include "ops/hilbert/make_attention.h"
#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include "core/io/text.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr std::array<std::string_view, 7> kTypes{"standard", "improved",     "hilbert",          "block_sparse",
                                                 "ring",     "ring_hilbert", "block_sparse_ring"};
constexpr std::array<std::string_view, 17> kKeys{
    "attention_type", "segment_lengths", "dilation_rates", "order",     "dilation_mode", "causal",
    "block_size",     "blocks",          "work_order",     "dropout",   "seed",          "scale",
    "backward",       "strict",          "length",         "transport", "shards"};
constexpr std::array<std::string_view, 4> kBuilders{"local", "dilated", "global_local", "top"};

std::vector<Index> read_list(const char* what, std::string_view text, char separator) {
  std::vector<Index> out;
  for (std::string_view part : split_text(text, separator)) out.push_back(read_index(what, part, 1));
  return out;
}

double read_number(const char* what, std::string_view text) {
  double x = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  check(!text.empty() && error == std::errc{} && end == text.data() + text.size(), what, ": '", text,
        "' is not a number");
  return x;
}

BlockPairs build_blocks(std::string_view text, Index n, const Tensor& q, const Tensor& k, const Permutation& order,
                        Index size) {
  const auto part = split_text(text, ':');
  const std::size_t builder = find_name("blocks", part[0], kBuilders);
  check(part.size() == (builder == 2 ? 3U : 2U), "blocks: '", text,
        "': expected local:RADIUS, dilated:R+R, global_local:GLOBAL:RADIUS or top:K");
  switch (builder) {
    case 0: return local_blocks(n, read_index("blocks", part[1], 0));
    case 1: return dilated_blocks(n, read_list("blocks", part[1], '+'));
    case 2: return global_local_blocks(n, read_index("blocks", part[1], 0), read_index("blocks", part[2], 0));
    default: return top_blocks(q, k, order, size, read_index("blocks", part[1], 1));
  }
}

}  // namespace

BlockPairs top_blocks(const Tensor& q, const Tensor& k, const Permutation& order, Index size, Index most) {
  check(q.rank() == 4 && k.rank() == 4 && q.dim(1) == k.dim(1) && q.dim(3) == k.dim(3), "top_blocks: q ", q.shape(),
        " and k ", k.shape(), " must be [batch, length, heads, dim] and agree in length and dim");
  check(size >= 1 && most >= 1, "top_blocks: size ", size, " and count ", most, " must be at least 1");
  const Tape::Pause pause;
  const Index length = q.dim(1), n = (length + size - 1) / size;
  // Mean over batch and heads first, then over the positions of each block.
  const auto pooled = [&](const Tensor& x) {
    const Tensor along = reorder(unsqueeze(mean(to(x, DType::f64), {0, 2}), 0), order, 1);
    std::vector<Tensor> rows;
    for (Index i = 0; i < n; ++i)
      rows.push_back(mean(slice(along, 1, i * size, std::min((i + 1) * size, length)), {1}));
    return n > 0 ? cat(rows, 0) : empty({0, x.dim(3)}, DType::f64);
  };
  const std::vector<double> score = matmul(pooled(q), transpose(pooled(k))).to_vector<double>();
  BlockPairs pairs;
  std::vector<std::int32_t> by_score(static_cast<std::size_t>(n));
  for (Index i = 0; i < n; ++i) {
    std::iota(by_score.begin(), by_score.end(), 0);
    const double* const row = score.data() + i * n;
    std::ranges::stable_sort(by_score, [&](auto a, auto b) { return row[a] > row[b]; });
    for (Index j = 0; j < std::min(most, n); ++j)
      pairs.emplace_back(static_cast<std::int32_t>(i), by_score[static_cast<std::size_t>(j)]);
  }
  return pairs;
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
  if (kind == 0 || kind == 4) a.mode_ = DilationMode::longnet;
  if (kind == 1) a.mode_ = DilationMode::head_groups;
  a.comm_ = comm;
  std::vector<Index> lengths{sparse ? 0 : 128}, rates;
  for (const auto& [key, value] : config) {
    const bool of_blocks = key == "block_size" || key == "blocks" || key == "work_order";
    const bool of_segments = key == "segment_lengths" || key == "dilation_rates" || key == "dilation_mode";
    const bool of_ranks = key == "length" || key == "transport" || key == "shards";
    check(!(of_ranks && !over_ranks), "make_attention: ", a.type_, " does not read ", key);
    check(!(of_blocks && !sparse) && !(of_segments && sparse), "make_attention: ", a.type_, " does not read ", key);
    if (key == "segment_lengths") lengths = read_list("segment_lengths", value, ',');
    else if (key == "dilation_rates") rates = read_list("dilation_rates", value, ',');
    else if (key == "order") a.order_ = value;
    else if (key == "dilation_mode") a.mode_ = parse_dilation_mode(value);
    else if (key == "causal") a.causality_ = parse_causality(value);
    else if (key == "block_size") a.block_size_ = read_index("block_size", value, 1);
    else if (key == "blocks") a.blocks_ = value;
    else if (key == "work_order") a.work_order_ = parse_work_order(value);
    else if (key == "dropout") a.options_.dropout = read_number("dropout", value);
    else if (key == "seed") a.seed_ = static_cast<std::uint64_t>(read_index("seed", value, 0));
    else if (key == "scale") a.options_.scale = read_number("scale", value);
    else if (key == "backward") a.options_.backward = parse_backward(value);
    else if (key == "strict")
      a.options_.strict = find_name("strict", value, std::array<std::string_view, 2>{"false", "true"}) == 1;
    else if (key == "length") a.length_ = read_index("length", value, 1);
    else if (key == "transport") a.transport_ = parse_transport(value);
    else if (key == "shards") a.dealing_ = parse_dealing(value);
  }
  check(!over_ranks || a.length_ > 0, "make_attention: ", a.type_, " needs length, the tokens of all ranks together");
  check(!over_ranks || !sparse || !a.blocks_.starts_with("top"),
        "make_attention: blocks = top:K compares the queries of all ranks; name another builder");
  if (sparse || (kind == 4 && !config.contains("segment_lengths"))) return a;
  if (rates.empty()) rates.assign(lengths.size(), 1);
  check(lengths.size() == rates.size(), "make_attention: ", lengths.size(), " segment_lengths and ", rates.size(),
        " dilation_rates must pair up");
  a.pattern_.clear();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    Branch b;
    b.kind = Branch::Kind::segment;
    b.size = lengths[i];
    b.dilation = rates[i];
    a.pattern_.push_back(b);
  }
  return a;
}

PlanSpec NamedAttention::spec(Index length, Index heads) const {
  PlanSpec spec;
  spec.length = length;
  spec.heads = heads;
  spec.pattern = pattern_;
  spec.dilation_mode = mode_;
  spec.causality = causality_;
  spec.work_order = work_order_;
  spec.order = parse_order(order_ == "auto" ? "hilbert" : order_, spec.length);
  return spec;
}

PlanPtr NamedAttention::plan(const Tensor& q, const Tensor& k) const {
  check(q.rank() == 4, "attention: q must be [batch, length, heads, dim], got ", q.shape());
  PlanSpec s = spec(q.dim(1), q.dim(2));
  if (type_ == "block_sparse") {
    const Index n = (s.length + block_size_ - 1) / block_size_;
    s.pattern = {blocks(block_size_, build_blocks(blocks_, n, q, k, *permutation(s.order, s.length), block_size_))};
  }
  if (order_ == "auto") s.order = choose_order(s).order;
  return make_plan(s);
}

ShardPlanPtr NamedAttention::shard(Index heads) const {
  check(length_ > 0, "make_attention: ", type_, " is not divided over ranks");
  PlanSpec s = spec(length_, heads);
  if (type_ == "block_sparse_ring") {
    const Index n = (s.length + block_size_ - 1) / block_size_;
    s.pattern = {blocks(block_size_, build_blocks(blocks_, n, {}, {}, *permutation(s.order, s.length), block_size_))};
  }
  if (order_ == "auto") s.order = choose_order(s).order;
  return make_shard_plan(s, comm_.size(), comm_.rank(), transport_, dealing_);
}

Tensor NamedAttention::operator()(const Tensor& q, const Tensor& k, const Tensor& v, std::uint64_t step) const {
  AttentionOptions options = options_;
  if (options.dropout > 0) options.key = RandomKey{seed_, step};
  if (length_ > 0) {
    check(q.rank() == 4, "attention: q must be [batch, rows, heads, dim], got ", q.shape());
    return ring_attention(q, k, v, shard(q.dim(2)), comm_, options);
  }
  return attention(q, k, v, plan(q, k), options);
}

}  // namespace hilt
