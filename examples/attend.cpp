// Attention on files: what the library computes, to check other code against.
//
//   attend --q q.npy --k k.npy --v v.npy --d-o do.npy --order hilbert:32x32 --pattern segment:128
//          --out out/attend
//
//   plan   hilbert:32x32, segment:128, causal none; 8 of 64 tiles of 128 x 128 touched, 8 of them full
//   wrote  out/attend/o.npy    f32[1, 1024, 4, 64]
//   ...
//
// Writes o, lse [B, H, L] and, with d_o, the gradients, also of the score terms that came from
// files: f64 if the inputs are f64, else f32, whatever type --dtype computes in.
#include <hilt/hilt.h>
#include <cmath>
#include <iostream>
#include <tuple>
#include "program/outputs.h"
#include "program/program.h"

using namespace hilt;

namespace {

struct Settings : program::AttentionTexts {
  std::string q, k, v, d_o, out = "out/attend";
  std::string mode = "fused", device = "auto", dtype, scale, softcap, queries, weights;
  std::string alibi, relative, bias, sink;  // files, but for alibi = published
  std::int64_t ranks = 1, seed = 0;
  double dropout = 0;
};

void declare(program::Options& options, Settings& s) {
  options.text("--q", s.q, "FILE", "Queries [B, L, H, D], a .npy file of f64 or f32");
  options.text("--k", s.k, "FILE", "Keys [B, L, Hk, D]; Hk divides H");
  options.text("--v", s.v, "FILE", "Values, shaped as the keys");
  options.text("--d-o", s.d_o, "FILE", "Gradient of some loss with respect to o; asks for dq, dk and dv");
  program::declare(options, s);
  options.text("--queries", s.queries, "FIRST:COUNT",
               "Which tokens --q and --d-o hold, a run or a list like 0,5,9:4 (default: the last ones); o, lse and dq "
               "have as many rows");
  options.text("--weights", s.weights, "ROWS",
               "Also write weights.npy [B, rows, H, L]: what these rows of --q give to each token, 0 where they do not "
               "attend; a list like 0,5,9:4");
  options.text("--scale", s.scale, "X", "Factor of q . k (default 1 / sqrt(D))");
  options.text("--softcap", s.softcap, "X", "Scores z become X tanh(z / X)");
  options.text_or("published", "--alibi", s.alibi, "SLOPES",
                  "Scores lose slope times distance; slopes [H] from a file, or the published ones");
  options.text("--relative", s.relative, "FILE",
               "Added by offset: [H, 2 R + 1] of tokens, [H, 2 RY + 1, 2 RX + 1] or three axes of the order's grid");
  options.text("--bias", s.bias, "FILE", "Added to scores; broadcasts to [B, H, L, L], by tokens; -inf masks");
  options.text("--sink", s.sink, "FILE", "[H]: a score beside every row's, with value 0");
  options.choice("--mode", s.mode, {"taped", "hybrid", "fused"}, "How gradients are obtained");
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  options.text("--dtype", s.dtype, "f64|f32|bf16|f16", "Type to compute in (default: that of the inputs)");
  options.number("--dropout", s.dropout, 0, 0.99, "Probability of dropping a weight, in forward and backward alike");
  options.integer("--seed", s.seed, 0, std::int64_t{1} << 53, "Of --dropout");
  options.integer("--ranks", s.ranks, 1, 1024, "Run as ring attention over so many ranks");
  options.text("--out", s.out, "DIR", "Where o.npy, lse.npy, dq.npy, dk.npy, dv.npy, d_slopes.npy .. go");
}

Tensor read_floats(const char* option, const std::string& path) {
  const Tensor x = read_npy(path);
  if (!is_floating(x.dtype()) || size_of(x.dtype()) < 4)
    fail_with(Code::data, option, " (", path, "): elements are ", x.dtype(), "; expected f64 or f32");
  return x;
}

Tensor read_input(const char* option, const std::string& path) {
  check(!path.empty(), option, ": needs a .npy file; --help lists the options");
  const Tensor x = read_floats(option, path);
  if (x.rank() != 4)
    fail_with(Code::data, option, " (", path, "): shape ", x.shape(), " has ", x.rank(),
              " axes; expected [batch, length, heads, dim]");
  return x;
}

void check_alike(const char* option, const Tensor& x, const Shape& shape, const Tensor& q) {
  if (x.dtype() != q.dtype())
    fail_with(Code::data, option, ": is ", x.dtype(), " and --q is ", q.dtype(), "; store both in one type");
  if (x.shape() != shape)
    fail_with(Code::data, option, ": shape ", x.shape(), ", expected ", shape, " to go with --q ", q.shape());
}

std::vector<std::int32_t> rows_of(const char* option, const std::string& text, Index end, const char* file) {
  std::vector<std::int32_t> rows;
  for (const std::string_view part : split_text(text, ',')) {
    const std::size_t colon = part.find(':');
    const Index first = read_index(option, part.substr(0, colon), 0),
                count = colon < part.size() ? read_index(option, part.substr(colon + 1), 1) : 1;
    check(first < end && count <= end - first, option, " (", program::brief(text), "): ", part, " reaches beyond the ",
          end, " rows of ", file);
    check(rows.empty() || first > rows.back(), option, " (", program::brief(text), "): ", first,
          " comes twice or late; name rows in ascending order");
    const auto run = query_run(first, count);
    rows.insert(rows.end(), run.begin(), run.end());
  }
  return rows;
}

/// [B, rows, H, L]
Tensor weights_of(const Tensor& q, const Tensor& k, const PlanPtr& plan, const std::vector<std::int32_t>& rows,
                  const AttentionOptions& options) {
  const std::vector<Index> wide(rows.begin(), rows.end());
  std::vector<double> all;
  for (const RowWeights& w : attention_weights(q, k, plan, wide, options)) {
    all.resize(all.size() + static_cast<std::size_t>(k.dim(1)));
    for (std::size_t i = 0; i < w.keys.size(); ++i)
      all[all.size() - static_cast<std::size_t>(k.dim(1) - w.keys[i])] = w.weights[i];
  }
  return from_values(all, {q.dim(0), std::ssize(wide), q.dim(2), k.dim(1)});
}

std::optional<double> parse_number(const char* option, const std::string& text, const char* otherwise) {
  if (text.empty()) return std::nullopt;
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  check(end && *end == 0 && std::isfinite(x), option, " (", text, "): not a number; ", otherwise);
  return x;
}

struct TermFile {
  const char* option;
  std::string Settings::*path;
  Tensor ScoreTerms::*tensor;
};
constexpr TermFile kTermFiles[] = {{"--alibi", &Settings::alibi, &ScoreTerms::slopes},
                                   {"--relative", &Settings::relative, &ScoreTerms::relative},
                                   {"--bias", &Settings::bias, &ScoreTerms::bias},
                                   {"--sink", &Settings::sink, &ScoreTerms::sink}};

/// Said when all has gone well: who fails says one thing.
void warn(std::string& warnings, const std::string& one) { warnings += "attend: warning: " + one + '\n'; }

void warn_about(const Plan& plan, std::string& warnings) {
  for (const Branch& b : plan.spec().pattern)
    if (b.kind == Branch::Kind::segment && b.dilation > b.size)
      warn(warnings, "--pattern (" + to_string(Pattern{b}) + "): dilation " + std::to_string(b.dilation) +
                         " exceeds the segment, " + std::to_string(b.size) + ": each row attends to at most 1 key");
  if (const Index empty = plan.empty_rows())
    warn(warnings, std::to_string(empty) + " of " +
                       std::to_string(plan.queries() * std::max<Index>(1, std::ssize(plan.spec().documents))) +
                       " rows attend to nothing: o = 0, lse = -inf and gradients 0 there");
  if (plan.order_forced()) warn(warnings, "HILT_FORCE_ORDER=row is set: every order is the identity");
}

/// What is not finite goes through, with a warning: where it comes from is the caller's to know.
void warn_about(const char* option, const std::string& path, const Tensor& x, bool& finite, std::string& warnings,
                bool mask = false) {
  const auto odd = x ? program::not_finite(x, !mask) : std::nullopt;
  if (!odd) return;
  finite = false;
  warn(warnings, std::string(option) + " (" + path + "): holds " + *odd + "; what attends to it is not finite either");
}

/// The same over ranks that are threads; while it computes, each holds its rows alone.
program::Named over_ranks(int ranks, const Plan& plan, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& d_o, const AttentionOptions& options) {
  program::Named results;
  run_ranks(ranks, [&](Comm& comm) {
    const ShardPlanPtr shard = make_shard_plan(plan.spec(), ranks, comm.rank());
    const auto rows = [&](const Tensor& x) { return rows_of_rank(x, *shard, comm.rank()); };
    const std::array<Tensor, 3> mine{rows(q), rows(k), rows(v)};
    program::Named part{{"o", {}}};
    if (d_o)
      part = program::with_gradients(mine, options.terms, rows(d_o),
                                     [&] { return ring_attention(mine[0], mine[1], mine[2], shard, comm, options); });
    const AttentionResult forward = ring_attention_with_lse(mine[0], mine[1], mine[2], shard, comm, options);
    part[0].second = forward.o;
    part.emplace(part.begin() + 1, "lse", permute(forward.lse, {0, 2, 1}));
    part = program::of_all_ranks(std::move(part), *shard, comm);
    part[1].second = contiguous(permute(part[1].second, {0, 2, 1}));
    if (comm.rank() == 0) results = std::move(part);
  });
  return results;
}

int work(const Settings& s) {
  Device device = program::device_of(s.device);
  const DType given_dtype = s.dtype.empty() ? DType::f32 : program::dtype_of(s.dtype);
  AttentionOptions options{.backward = parse_backward(s.mode),
                           .scale = parse_number("--scale", s.scale, "1 / sqrt(D) is the default")};
  options.dropout = s.dropout;
  if (s.dropout > 0) options.key = RandomKey{static_cast<std::uint64_t>(s.seed), 0};
  options.terms.softcap = parse_number("--softcap", s.softcap, "scores stay within it");
  check(!options.terms.softcap || *options.terms.softcap > 0, "--softcap (", s.softcap, "): must be above 0");
  options.terms.alibi = s.alibi == "published";

  Tensor q = read_input("--q", s.q), k = read_input("--k", s.k), v = read_input("--v", s.v);
  const Index length = k.dim(1);
  if (s.queries.empty() && q.dim(1) > length)
    fail_with(Code::data, "--q (", s.q, "): ", q.dim(1), " rows, and --k has ", length, " tokens; each query is one");
  check_alike("--k", k, {q.dim(0), length, k.dim(2), q.dim(3)}, q);
  check_alike("--v", v, k.shape(), q);
  Tensor d_o;
  if (!s.d_o.empty()) check_alike("--d-o", d_o = read_input("--d-o", s.d_o), q.shape(), q);
  const DType stored = q.dtype(), dtype = s.dtype.empty() ? stored : given_dtype;
  if (q.dim(2) == 0 || k.dim(2) == 0 || q.dim(2) % k.dim(2) != 0)
    fail_with(Code::data, "--k: ", k.dim(2), " key heads cannot serve the ", q.dim(2), " heads of --q evenly");

  PlanSpec spec = program::spec_of(s, length, q.dim(2));
  program::require_memory("--pattern (" + s.pattern + ")", program::least_plan_bytes(length, spec.pattern),
                          "use a sparser one");
  check(s.ranks <= std::max<Index>(length, 1), "--ranks (", s.ranks, "): more than the ", length, " tokens of --k");
  check(spec.documents.size() <= 1 || std::ssize(spec.documents) == q.dim(0), "--documents (",
        program::brief(s.documents), "): ", spec.documents.size(), " lists, but --q has ", q.dim(0), " rows");
  if (!s.queries.empty()) spec.queries = rows_of("--queries", s.queries, length, "--k");
  else if (q.dim(1) < length) spec.queries = query_run(length - q.dim(1), q.dim(1));
  check(spec.rows_of_q() == q.dim(1), "--queries (", program::brief(s.queries), "): names ", spec.rows_of_q(),
        " tokens, and --q has ", q.dim(1), " rows");
  std::vector<std::int32_t> weighed;
  if (!s.weights.empty()) weighed = rows_of("--weights", s.weights, q.dim(1), "--q");
  PlanPtr plan;
  program::plan_from(s.order, s.pattern, [&] { plan = make_plan(spec); });
  if (s.device == "auto" && dtype == DType::f64) device = {};  // f64 is the CPU's
  const Tensor as_read[] = {q, k, v};
  const auto placed = [&](const Tensor& x) { return to(to(x, dtype), device); };
  q = placed(q), k = placed(k), v = placed(v);
  const auto memory_of = [&](const ScoreTerms& terms) {
    return attention_memory(*plan, q.dim(0), k.dim(2), q.dim(3), dtype, options.backward, terms);
  };
  std::array<Tensor, std::size(kTermFiles)> terms_as_read;
  for (std::size_t i = 0; i < std::size(kTermFiles); ++i) {
    const TermFile& term = kTermFiles[i];
    if ((s.*term.path).empty() || (i == 0 && options.terms.alibi)) continue;
    terms_as_read[i] = read_floats(term.option, s.*term.path);
    ScoreTerms one;
    one.*term.tensor = to(to(terms_as_read[i], dtype == DType::f64 ? DType::f64 : DType::f32), device);
    try {
      (void)memory_of(one);  // fits?
    } catch (const Error& e) { fail_with(Code::data, term.option, " (", s.*term.path, "): ", e.what()); }
    options.terms.*term.tensor = one.*term.tensor;
  }
  if (device.is_cpu() && (d_o || options.backward == Backward::taped))
    program::require_memory("--mode (" + s.mode + ")", memory_of(options.terms).peak,
                            options.backward == Backward::fused ? "use a sparser --pattern or a narrower --dtype"
                                                                : "--mode fused keeps no scores");
  program::Outputs outputs(s.out);
  bool finite = true;
  std::string warnings;
  for (const auto& [option, path, x] :
       {std::tuple("--q", s.q, as_read[0]), {"--k", s.k, as_read[1]}, {"--v", s.v, as_read[2]}, {"--d-o", s.d_o, d_o}})
    warn_about(option, path, x, finite, warnings);
  for (std::size_t i = 0; i < std::size(kTermFiles); ++i)
    warn_about(kTermFiles[i].option, s.*kTermFiles[i].path, terms_as_read[i], finite, warnings, i >= 2);
  warn_about(*plan, warnings);

  if (d_o) d_o = placed(d_o);
  program::Named results{{"o", {}}};
  if (s.ranks > 1) {
    results = over_ranks(static_cast<int>(s.ranks), *plan, q, k, v, d_o, options);
  } else {
    const AttentionResult forward = attention_with_lse(q, k, v, plan, options);
    if (d_o)
      results =
          program::with_gradients({q, k, v}, options.terms, d_o, [&] { return attention(q, k, v, plan, options); });
    results[0].second = forward.o;
    results.emplace(results.begin() + 1, "lse", forward.lse);
  }
  if (!s.weights.empty()) results.emplace_back("weights", weights_of(q, k, plan, weighed, options));
  for (const Fallback& f : attention_fallbacks())
    warn(warnings, std::string(name_of(f.asked)) + " ran as " + std::string(name_of(f.ran)) + ": " + f.reason);

  for (auto& [name, x] : results) {
    x = to(to(x, Device{}), stored == DType::f64 ? DType::f64 : DType::f32);
    if (const auto odd = finite ? program::not_finite(x, name != "lse") : std::nullopt)
      fail_with(Code::not_a_number, name, ": ", *odd, ", though all inputs are finite: a step on the way is beyond ",
                dtype, dtype == DType::f64 ? "; scale the inputs down" : "; try --dtype f64, or scale the inputs down");
  }

  const TileStats tiles = plan->stats();
  const bool chosen = spec.order.kind == Order::Kind::automatic;
  std::cout << "plan   " << to_string(plan->spec().order) << (chosen ? " (auto), " : ", ")
            << to_string(plan->spec().pattern) << ", causal " << s.causal
            << (s.documents.empty() ? "" : ", documents " + program::brief(s.documents)) << "; "
            << tiles.full + tiles.partial << " of " << tiles.total << " tiles of 128 x 128 touched, " << tiles.full
            << " of them full\n";
  for (const auto& [name, x] : results) {
    write_npy(outputs.stage(name + ".npy"), x);
    std::cout << "wrote  " << outputs.directory() << '/' << name << ".npy  " << x.dtype() << x.shape() << '\n';
  }
  if (!std::cout.flush()) return 0;  // run() says why; nothing is left
  outputs.commit();
  std::cerr << warnings;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("attend", [&] {
    Settings settings;
    program::Options options("attend", "Hilbert attention on .npy files: o, lse and, with --d-o, the gradients.");
    declare(options, settings);
    return options.parse(argc, argv) ? work(settings) : 0;
  });
}
