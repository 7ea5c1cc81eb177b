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
#include <iostream>
#include "program/program.h"

using namespace hilt;

namespace {

const std::string kPublished = "published";
constexpr std::string_view kPoints = "points:", kNpy = ".npy", kBits = "/bits=";

/// A term of the scores that has a tensor.
struct Term {
  std::string name;
  Tensor ScoreTerms::*tensor;
  bool masks = false;  // -inf stands for something
  std::string path{};  // or, of slopes, kPublished
  Tensor read{};       // as the file has it
  std::string option() const { return "--" + name; }
};

struct Settings : AttentionSettings {
  std::string q, k, v, d_o, permutation, points, weights, device = "auto", dtype, out = "out/attend";
  std::vector<Term> terms{{"alibi", &ScoreTerms::slopes},
                          {"relative", &ScoreTerms::relative},
                          {"bias", &ScoreTerms::bias, true},
                          {"sink", &ScoreTerms::sink, true}};
  std::int64_t ranks = 1;
};

void declare(program::Options& options, Settings& s) {
  s.ranks = program::ranks_started(s.ranks);
  options.text("--q", s.q, "FILE", "Queries [B, L, H, D], a .npy file of f64 or f32");
  options.text("--k", s.k, "FILE", "Keys [B, L, Hk, D]; Hk divides H");
  options.text("--v", s.v, "FILE", "Values, shaped as the keys");
  options.text("--d-o", s.d_o, "FILE", "Gradient of some loss with respect to o; asks for dq, dk and dv");
  program::declare(options, s, {"order", "pattern", "dilation_mode", "causal", "documents", "queries"});
  options.text("--permutation", s.permutation, "FILE",
               "Of --order given: the token at each position, whole numbers [L], or [B, L] for each row of the batch; "
               "--order points:FILE.npy[/hilbert|hilbert-trans|morton|morton-trans][/bits=B] makes it of points "
               "[L, 2 or 3] or [B, L, 2 or 3]");
  options.text("--weights", s.weights, "ROWS",
               "Also write weights.npy [B, rows, H, L]: what these rows of --q give to each token, 0 where they do not "
               "attend; a list like 0,5,9:4");
  program::declare(options, s, {"scale", "softcap"});
  for (Term& term : s.terms) {
    const std::string help(attention_setting(term.name).tensor);
    if (term.name == "alibi") options.text_or(kPublished, term.option(), term.path, "FILE", help);
    else options.text(term.option(), term.path, "FILE", help);
  }
  options.text("--points", s.points, "FILE",
               "Of --relative: whole numbers [L, axes], or [B, L, axes] for each row of the batch; its table then "
               "looks at these, not at tokens or the grid");
  const AttentionSetting& backward = attention_setting("backward");
  options.choice("--mode", s.backward, {backward.choices.begin(), backward.choices.end()}, std::string(backward.help));
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  options.text("--dtype", s.dtype, "f64|f32|bf16|f16", "Type to compute in (default: that of the inputs)");
  program::declare(options, s, {"dropout", "seed"});
  options.integer("--ranks", s.ranks, 1, 1024, "Run as ring attention over so many ranks");
  options.text("--out", s.out, "DIR", "Where o.npy, lse.npy, dq.npy, dk.npy, dv.npy, d_slopes.npy .. go");
}

Tensor read_floats(const std::string& option, const std::string& path) {
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
    const auto [from, many] = cut_text(part, ':');
    const Index first = read_index(option, from, 0), count = from == part ? 1 : read_index(option, many, 1);
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

/// Printed when all has gone well: a failure prints its error alone.
void warn(std::string& warnings, const std::string& one) { warnings += "attend: warning: " + one + '\n'; }

/// What was read, as it lies in the files, and what it comes to.
struct Call {
  Tensor q, k, v, d_o;
  std::vector<Term> terms;
  DType dtype = DType::f32;  // to compute in
  Device device;
  PlanPtr plan;
  AttentionOptions options;  // its tensors lie on the device
  std::vector<std::int32_t> weighed;

  AttentionMemory memory_of(const ScoreTerms& with) const {
    return attention_memory(*plan, q.dim(0), k.dim(2), q.dim(3), dtype, options.backward, with, device);
  }
  Tensor placed(const Tensor& x) const { return x ? to(to(x, dtype), device) : x; }
};

void read_inputs(Call& c, const Settings& s) {
  c.q = read_input("--q", s.q), c.k = read_input("--k", s.k), c.v = read_input("--v", s.v);
  const Index length = c.k.dim(1);
  if (s.queries.empty() && c.q.dim(1) > length)
    fail_with(Code::data, "--q (", s.q, "): ", c.q.dim(1), " rows, and --k has ", length, " tokens; each query is one");
  check_alike("--k", c.k, {c.q.dim(0), length, c.k.dim(2), c.q.dim(3)}, c.q);
  check_alike("--v", c.v, c.k.shape(), c.q);
  if (!s.d_o.empty()) check_alike("--d-o", c.d_o = read_input("--d-o", s.d_o), c.q.shape(), c.q);
  if (c.q.dim(2) == 0 || c.k.dim(2) == 0 || c.q.dim(2) % c.k.dim(2) != 0)
    fail_with(Code::data, "--k: ", c.k.dim(2), " key heads cannot serve the ", c.q.dim(2), " heads of --q evenly");
  if (c.q.dim(2) > PlanSpec::kMostHeads)
    fail_with(Code::data, "--q (", s.q, "): ", c.q.dim(2), " heads; at most ", PlanSpec::kMostHeads, " are served");
  if (s.dtype.empty()) c.dtype = c.q.dtype();
  c.device = program::device_of(s.device, c.dtype);
}

/// What --order points:.. names.
struct Points {
  std::string file;
  std::string_view kind = "hilbert", bits = "16";
};
Points points_of(const std::string& order) {
  Points points;
  const std::size_t at = order.rfind(kNpy), end = at + kNpy.size();
  std::string_view rest = std::string_view(order).substr(at == order.npos ? 0 : end);
  if (const std::size_t bits = rest.find(kBits); bits != rest.npos)
    points.bits = rest.substr(bits + kBits.size()), rest = rest.substr(0, bits);
  if (rest.starts_with('/')) points.kind = std::exchange(rest, {}).substr(1);
  check(at != order.npos && rest.empty() && !points.kind.empty(), "--order (", program::brief(order),
        "): expected points:FILE.npy[/KIND][/bits=B]");
  points.file = order.substr(kPoints.size(), end - kPoints.size());
  return points;
}
/// What --order given or points:.. says, or nothing where it names an order: [L] or [B, L].
Tensor permutation_of(const Settings& s, const std::vector<DocumentList>& documents, Index batch, Index length) {
  const bool given = s.order == "given";
  check(s.permutation.empty() || given, "--permutation (", s.permutation, "): goes with --order given, not ",
        program::brief(s.order));
  check(!s.permutation.empty() || !given, "--order (given): needs --permutation FILE, the token at each position");
  if (given) return read_npy(s.permutation);
  if (!s.order.starts_with(kPoints)) return {};
  const Points said = points_of(s.order);
  const Index bits = read_index("--order: bits", said.bits, 1);
  check(bits <= 31, "--order (", program::brief(s.order), "): ", bits, " bits; expected 1..31 on 2 axes, 1..20 on 3");
  const auto ordered = [&](const Tensor& xyz, const std::vector<Index>& lengths) {
    return order_of_points(xyz, said.kind, static_cast<int>(bits), lengths).token_at;
  };
  const Tensor points = read_npy(said.file), all = points.rank() == 2 ? unsqueeze(points, 0) : points;
  if (all.rank() != 3 || (all.dim(0) != 1 && all.dim(0) != batch) || all.dim(1) != length || all.dim(2) / 2 != 1)
    fail_with(Code::data, "--order (", program::brief(s.order), "): points ", points.shape(), "; expected [", length,
              ", 2 or 3] or [", batch, ", ", length, ", 2 or 3]");
  (void)ordered(zeros({0, all.dim(2)}), {});  // what was said; the rest is the file
  if (all.numel() == 0) return {};
  std::vector<Tensor> rows;
  for (Index row = 0; row < std::max<Index>(all.dim(0), std::ssize(documents)); ++row) {
    std::vector<Index> lengths;
    if (!documents.empty())
      for (const Document& d : documents[documents.size() == 1 ? 0 : static_cast<std::size_t>(row)])
        lengths.push_back(d.length);
    check(std::reduce(lengths.begin(), lengths.end()) <= length, "--documents (", program::brief(s.documents),
          "): those of row ", row, " hold more tokens than a row has, ", length);
    const Index of = all.dim(0) == 1 ? 0 : row;
    try {
      rows.push_back(ordered(squeeze(slice(all, 0, of, of + 1), 0), lengths));
    } catch (const Error& e) { fail_with(Code::data, e.what()); }
  }
  return rows.size() == 1 ? rows[0] : stack(rows);
}

/// The plan's order where one serves all rows; else the calls'.
void take_order(Call& c, PlanSpec& spec, const Settings& s) {
  Tensor order = permutation_of(s, spec.documents, c.q.dim(0), spec.length);
  if (!order) return;
  if (order.rank() == 2 && order.dim(0) == 1) order = squeeze(order, 0);
  spec.order = Order{.kind = Order::Kind::given};
  const std::string& option = s.permutation.empty() ? "--order" : "--permutation";
  const Shape one{spec.length}, each{c.q.dim(0), spec.length};
  if (is_floating(order.dtype()) || (order.shape() != one && order.shape() != each))
    fail_with(Code::data, option, ": is ", order.dtype(), order.shape(), "; expected i32 or i64 ", one, " or ", each);
  const std::vector<std::int64_t> tokens = to(order, DType::i64).to_vector<std::int64_t>();
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= spec.length)
      fail_with(Code::data, option, ": row ", static_cast<Index>(i) / spec.length, ": position ",
                static_cast<Index>(i) % spec.length, " names token ", tokens[i], ", which is not among 0..",
                spec.length - 1);
  if (order.rank() > 1) return void(c.options.permutation = to(order, c.device));
  for (const std::int64_t token : tokens) spec.given.push_back(static_cast<std::int32_t>(token));
}

void plan_it(Call& c, const Settings& s) {
  const Index length = c.k.dim(1), rows = c.q.dim(1);
  AttentionSettings named = s;
  if (s.order == "given" || s.order.starts_with(kPoints)) named.order = "row";
  PlanSpec spec = program::spec_of(named, length, c.q.dim(2));
  program::require_memory("--pattern (" + s.pattern + ")", program::least_plan_bytes(length, spec.pattern),
                          "use a sparser one");
  check(s.ranks <= std::max<Index>(length, 1), "--ranks (", s.ranks, "): more than the ", length, " tokens of --k");
  check(spec.documents.size() <= 1 || std::ssize(spec.documents) == c.q.dim(0), "--documents (",
        program::brief(s.documents), "): ", spec.documents.size(), " lists, but --q has ", c.q.dim(0), " rows");
  check(s.ranks == 1 || s.queries.empty(), "--ranks (", s.ranks, "): --queries ", program::brief(s.queries),
        " is for one rank; leave one of them out");
  check(s.ranks == 1 || rows == length, "--ranks (", s.ranks, "): --q has ", rows, " rows of ", length,
        " tokens; ranks hold rows of all");
  check(s.ranks == 1 || c.options.backward == Backward::fused, "--ranks (", s.ranks, "): --mode ", s.backward,
        " is for one rank; use fused");
  if (!s.queries.empty()) spec.queries = rows_of("--queries", s.queries, length, "--k");
  else if (rows < length) spec.queries = query_run(length - rows, rows);
  check(spec.rows_of_q() == rows, "--queries (", program::brief(s.queries), "): names ", spec.rows_of_q(),
        " tokens, and --q has ", rows, " rows");
  take_order(c, spec, s);
  check(!c.options.permutation || s.ranks == 1, "--ranks (", s.ranks,
        "): rows have orders of their own; give one of all");
  if (!s.weights.empty()) c.weighed = rows_of("--weights", s.weights, rows, "--q");
  program::plan_from(s.order, s.pattern, [&] { c.plan = make_plan(spec); });
}

void read_terms(Call& c, const Settings& s) {
  check(s.points.empty() || !c.terms[1].path.empty(), "--points (", s.points,
        "): goes with --relative FILE, a table that looks at them");
  if (!s.points.empty()) c.options.terms.points = to(read_npy(s.points), c.device);
  for (Term& term : c.terms) {
    if (term.path.empty() || (term.name == "alibi" && c.options.terms.alibi)) continue;
    term.read = read_floats(term.option(), term.path);
    ScoreTerms one;
    if (term.name == "relative") one.points = c.options.terms.points;
    one.*term.tensor = to(to(term.read, c.dtype == DType::f64 ? DType::f64 : DType::f32), c.device);
    try {
      (void)c.memory_of(one);  // fits?
    } catch (const Error& e) { fail_with(Code::data, term.option(), " (", term.path, "): ", e.what()); }
    c.options.terms.*term.tensor = one.*term.tensor;
  }
}

/// A result does not replace what it was computed from.
void refuse_own_input(const Settings& s, const std::string& result) {
  std::vector<std::string> inputs{s.q, s.k, s.v, s.d_o, s.permutation, s.points};
  if (s.order.starts_with(kPoints)) inputs.push_back(points_of(s.order).file);
  for (const Term& term : s.terms) inputs.push_back(term.path);
  for (std::size_t i = s.pattern.find('@'); i != s.pattern.npos; i = s.pattern.find('@', i + 1))
    inputs.push_back(s.pattern.substr(i + 1, s.pattern.find(kNpy, i) + 3 - i));  // lists of blocks
  std::error_code none;
  for (const std::string& path : inputs)
    check(path.empty() || !std::filesystem::equivalent(path, result, none), "--out (", s.out, "): ", result,
          " is an input; name another directory");
}

/// Warns of what was read; whether all of it is finite. What is not goes through: where it comes
/// from is the caller's to know.
bool look_at(const Call& c, const Settings& s, std::string& warnings) {
  bool finite = true;
  const auto look = [&](const std::string& option, const std::string& path, const Tensor& x, bool is_mask = false) {
    const auto odd = x ? program::not_finite(x, !is_mask) : std::nullopt;
    if (!odd) return;
    finite = false;
    warn(warnings, option + " (" + path + "): holds " + *odd + "; what attends to it is not finite either");
  };
  look("--q", s.q, c.q), look("--k", s.k, c.k), look("--v", s.v, c.v), look("--d-o", s.d_o, c.d_o);
  for (const Term& term : c.terms) look(term.option(), term.path, term.read, term.masks);
  for (const std::string& line : program::oddities_of(*c.plan)) warn(warnings, line);
  return finite;
}

/// o and lse, which forward gave, and where there is d_o the gradients.
program::Named results_of(const AttentionResult& forward, const std::array<Tensor, 4>& inputs, const ScoreTerms& terms,
                          const std::function<Tensor()>& again) {
  program::Named results{{"o", {}}};
  if (inputs[3]) results = program::with_gradients(inputs, terms, again);
  results[0].second = forward.o;
  results.emplace(results.begin() + 1, "lse", forward.lse);
  return results;
}

/// Over ranks the first gets all, the others nothing; while it computes, each holds its rows alone.
program::Named computed(const Call& c, const Settings& s) {
  const std::array<Tensor, 4> all{c.placed(c.q), c.placed(c.k), c.placed(c.v), c.placed(c.d_o)};
  const auto& [q, k, v, d_o] = all;
  const AttentionOptions& options = c.options;
  program::Named results;
  if (s.ranks == 1)
    results = results_of(attention_with_lse(q, k, v, c.plan, options), all, options.terms,
                         [&] { return attention(all[0], all[1], all[2], c.plan, options); });
  else
    (void)program::run_as("attend", s.ranks, "auto", [&](Comm& comm) {
      const ShardPlanPtr shard = make_shard_plan(c.plan->spec(), comm.size(), comm.rank());
      std::array<Tensor, 4> mine = all;
      for (Tensor& x : mine) x = x ? rows_of_rank(x, *shard, comm.rank()) : x;
      AttentionResult forward = ring_attention_with_lse(mine[0], mine[1], mine[2], shard, comm, options);
      forward.lse = permute(forward.lse, {0, 2, 1});
      program::Named part = results_of(forward, mine, options.terms,
                                       [&] { return ring_attention(mine[0], mine[1], mine[2], shard, comm, options); });
      part = program::of_all_ranks(std::move(part), *shard, comm);
      part[1].second = contiguous(permute(part[1].second, {0, 2, 1}));
      if (comm.rank() == 0) results = std::move(part);
      return 0;
    });
  if (!results.empty() && !s.weights.empty())
    results.emplace_back("weights", weights_of(q, k, c.plan, c.weighed, options));
  return results;
}

int work(const program::Options&, const Settings& s) {
  Call c;
  c.terms = s.terms;
  (void)program::device_of(s.device);  // before anything is read
  if (!s.dtype.empty()) c.dtype = program::dtype_of(s.dtype);
  c.options = attention_options(s);
  if (s.softcap > 0) c.options.terms.softcap = s.softcap;
  c.options.terms.alibi = s.terms[0].path == kPublished;
  read_inputs(c, s);
  plan_it(c, s);
  read_terms(c, s);
  if (c.device.is_cpu() && (c.d_o || c.options.backward == Backward::taped))
    program::require_memory("--mode (" + s.backward + ")", static_cast<double>(c.memory_of(c.options.terms).peak),
                            c.options.backward == Backward::fused ? "use a sparser --pattern or a narrower --dtype"
                                                                  : "--mode fused keeps no scores");
  std::optional<program::Outputs> staged;
  if (program::ranks_started(1) == 1) staged.emplace(s.out);  // of several processes the first alone writes
  std::string warnings;
  const bool finite = look_at(c, s, warnings);
  program::Named results = computed(c, s);
  if (results.empty()) return 0;
  program::Outputs& outputs = staged ? *staged : staged.emplace(s.out);
  for (const std::string& line : program::fallbacks_taken()) warn(warnings, line);
  for (auto& [name, x] : results) {
    x = to(to(x, Device{}), c.q.dtype() == DType::f64 ? DType::f64 : DType::f32);
    if (const auto odd = finite ? program::not_finite(x, name != "lse") : std::nullopt)
      fail_with(Code::not_a_number, name, ": ", *odd, ", though all inputs are finite: a step on the way is beyond ",
                c.dtype,
                c.dtype == DType::f64 ? "; scale the inputs down" : "; try --dtype f64, or scale the inputs down");
  }

  const TileStats tiles = c.plan->stats();
  std::cout << "plan   " << to_string(c.plan->spec().order) << (s.order.starts_with("auto") ? " (auto), " : ", ")
            << to_string(c.plan->spec().pattern) << ", causal " << s.causal
            << (s.documents.empty() ? "" : ", documents " + program::brief(s.documents)) << "; "
            << tiles.full + tiles.partial << " of " << tiles.total << " tiles of 128 x 128 touched, " << tiles.full
            << " of them full\n";
  for (const auto& [name, x] : results) refuse_own_input(s, outputs.directory() + '/' + name + ".npy");
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
  return program::run<Settings>("attend", "Hilbert attention on .npy files: o, lse and, with --d-o, the gradients.",
                                argc, argv, declare, work);
}
