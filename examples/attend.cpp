// Attention on files: what the library computes, to check other code against.
//
//   attend --q q.npy --k k.npy --v v.npy --d-o do.npy --order hilbert:32x32 --pattern segment:128
//          --out out/attend
//
//   plan   hilbert:32x32, segment:128, causal none; 8 of 64 tiles of 128 x 128 touched, 8 of them full
//   wrote  out/attend/o.npy    f32[1, 1024, 4, 64]
//   ...
//
// Reads q [B, L, H, D], k and v [B, L, Hk, D], optionally the cotangent d_o of o. Writes o,
// lse [B, H, L] and, with d_o, dq, dk and dv: f64 if the inputs are f64, else f32, whatever type
// --dtype computes in.
#include <hilt/hilt.h>

#include <cmath>
#include <iostream>
#include <optional>
#include <tuple>

#include "program/outputs.h"
#include "program/program.h"

using namespace hilt;

namespace {

struct Settings {
  std::string q, k, v, d_o, out = "out/attend";
  std::string order = "hilbert", pattern = "dense", dilation_mode = "all_queries", causal = "none";
  std::string mode = "fused", device = "auto", dtype, scale;
  std::int64_t ranks = 1;
};

void declare(program::Options& options, Settings& s) {
  options.text("--q", s.q, "FILE", "Queries [B, L, H, D], a .npy file of f64 or f32");
  options.text("--k", s.k, "FILE", "Keys [B, L, Hk, D]; Hk divides H");
  options.text("--v", s.v, "FILE", "Values, shaped as the keys");
  options.text("--d-o", s.d_o, "FILE", "Gradient of some loss with respect to o; asks for dq, dk and dv");
  options.text("--order", s.order, "ORDER",
               "row, snake, morton, tiles or hilbert, which fold a sequence; hilbert:HxW, hilbert:TxHxW, "
               "tiles:HxW/hxw; suffix ,scope=segment or ,chunk=N");
  options.text("--pattern", s.pattern, "PATTERN",
               "dense, segment:W[,dilation=R][,offset=O], slide:R, neighborhood:K, window2d:HxW, "
               "slide2d:RYxRX, neighborhood2d:KYxKX, blocks:SIZE@FILE.npy; joined by +");
  options.choice("--dilation-mode", s.dilation_mode, {"all_queries", "longnet", "head_groups", "residue"},
                 "Who asks where a segment is dilated");
  options.choice("--causal", s.causal, {"none", "token", "curve"},
                 "Which keys are in the past: of a token, or along the curve");
  options.text("--scale", s.scale, "X", "Factor of q . k (default 1 / sqrt(D))");
  options.choice("--mode", s.mode, {"taped", "hybrid", "fused"}, "How gradients are obtained");
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  options.text("--dtype", s.dtype, "f64|f32|bf16|f16", "Type to compute in (default: that of the inputs)");
  options.integer("--ranks", s.ranks, 1, 1024, "Run as ring attention over so many ranks");
  options.text("--out", s.out, "DIR", "Where o.npy, lse.npy, dq.npy, dk.npy, dv.npy go");
}

Tensor read_input(const char* option, const std::string& path) {
  check(!path.empty(), option, ": needs a .npy file; --help lists the options");
  const Tensor x = read_npy(path);
  if (!is_floating(x.dtype()) || size_of(x.dtype()) < 4)
    fail_with(Code::data, option, " (", path, "): elements are ", x.dtype(), "; expected f64 or f32");
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

DType parse_dtype(const std::string& text, DType otherwise) {
  for (DType t : {DType::f64, DType::f32, DType::bf16, DType::f16})
    if (text == name_of(t)) return t;
  check(text.empty(), "--dtype (", text, "): must be one of f64, f32, bf16, f16");
  return otherwise;
}

std::optional<double> parse_scale(const std::string& text) {
  if (text.empty()) return std::nullopt;
  char* end = nullptr;
  const double scale = std::strtod(text.c_str(), &end);
  check(end && *end == 0 && std::isfinite(scale), "--scale (", text, "): not a number; 1 / sqrt(D) is the default");
  return scale;
}

void warn(const std::string& text) { std::cerr << "attend: warning: " << text << '\n'; }

void warn_about(const Plan& plan) {
  for (const Branch& b : plan.spec().pattern)
    if (b.kind == Branch::Kind::segment && b.dilation > b.size)
      warn("--pattern (" + to_string(Pattern{b}) + "): dilation " + std::to_string(b.dilation) +
           " exceeds the segment, " + std::to_string(b.size) + ": each row attends to at most 1 key");
  if (const Index empty = plan.empty_rows())
    warn(std::to_string(empty) + " of " + std::to_string(plan.length()) +
         " rows attend to nothing: o = 0, lse = -inf and gradients 0 there");
  if (plan.order_forced()) warn("HILT_FORCE_ORDER=row is set: every order is the identity");
}

/// What is not finite goes through, with a warning: where it comes from is the caller's to know.
void warn_about(const char* option, const std::string& path, const Tensor& x, bool& finite) {
  const auto odd = x ? program::not_finite(x) : std::nullopt;
  if (!odd) return;
  finite = false;
  warn(std::string(option) + " (" + path + "): holds " + *odd + "; what attends to it is not finite either");
}

void check_fits(const Plan& plan, const Tensor& q, const Tensor& k, Backward mode) {
  program::require_memory(
      "--mode (" + std::string(name_of(mode)) + ")",
      attention_memory(plan, q.dim(0), k.dim(2), q.dim(3), q.dtype(), mode).peak,
      mode == Backward::fused ? "use a sparser --pattern or a narrower --dtype" : "--mode fused keeps no scores");
}

/// The same over ranks that are threads of this process; every rank holds its rows alone while it
/// computes.
std::vector<std::pair<std::string, Tensor>> over_ranks(int ranks, const Plan& plan, const Tensor& q, const Tensor& k,
                                                       const Tensor& v, const Tensor& d_o,
                                                       const AttentionOptions& options) {
  std::vector<std::pair<std::string, Tensor>> results;
  run_ranks(ranks, [&](Comm& comm) {
    const ShardPlanPtr shard = make_shard_plan(plan.spec(), ranks, comm.rank());
    const auto rows = [&](const Tensor& x) { return rows_of_rank(x, *shard, comm.rank()); };
    const Tensor mine[] = {rows(q), rows(k), rows(v)};
    std::vector<std::pair<std::string, Tensor>> all;
    const auto add = [&](const char* name, const Tensor& x) { all.emplace_back(name, whole_of_rows(x, *shard, comm)); };
    const AttentionResult forward = ring_attention_with_lse(mine[0], mine[1], mine[2], shard, comm, options);
    add("o", forward.o);
    add("lse", permute(forward.lse, {0, 2, 1}));
    all.back().second = contiguous(permute(all.back().second, {0, 2, 1}));
    if (d_o) {
      Tape tape;
      for (const Tensor& x : mine) tape.watch(x);
      const Gradients g = tape.backward(ring_attention(mine[0], mine[1], mine[2], shard, comm, options), rows(d_o));
      add("dq", g[mine[0]]), add("dk", g[mine[1]]), add("dv", g[mine[2]]);
    }
    if (comm.rank() == 0) results = std::move(all);
  });
  return results;
}

int work(const Settings& s) {
  Device device = program::device_of(s.device);
  const DType given_dtype = parse_dtype(s.dtype, DType::f32);
  const AttentionOptions options{.backward = parse_backward(s.mode), .scale = parse_scale(s.scale)};

  Tensor q = read_input("--q", s.q), k = read_input("--k", s.k), v = read_input("--v", s.v);
  check_alike("--k", k, {q.dim(0), q.dim(1), k.dim(2), q.dim(3)}, q);
  check_alike("--v", v, k.shape(), q);
  Tensor d_o;
  if (!s.d_o.empty()) check_alike("--d-o", d_o = read_input("--d-o", s.d_o), q.shape(), q);
  const DType stored = q.dtype(), dtype = s.dtype.empty() ? stored : given_dtype;
  if (q.dim(2) == 0 || k.dim(2) == 0 || q.dim(2) % k.dim(2) != 0)
    fail_with(Code::data, "--k: ", k.dim(2), " key heads cannot serve the ", q.dim(2), " heads of --q evenly");

  const Pattern pattern = program::pattern_of(s.pattern, q.dim(1));
  program::require_memory("--pattern (" + s.pattern + ")", program::least_plan_bytes(q.dim(1), pattern),
                          "use a sparser one");
  check(s.ranks <= std::max<Index>(q.dim(1), 1), "--ranks (", s.ranks, "): more than the ", q.dim(1), " tokens of --q");
  const PlanSpec spec{.length = q.dim(1),
                      .heads = q.dim(2),
                      .order = program::order_of(s.order, q.dim(1)),
                      .pattern = pattern,
                      .dilation_mode = parse_dilation_mode(s.dilation_mode),
                      .causality = parse_causality(s.causal)};
  PlanPtr plan;
  program::plan_from(s.order, s.pattern, [&] { plan = make_plan(spec); });
  if (s.device == "auto" && dtype == DType::f64) device = {};  // f64 is the CPU's
  const Tensor as_read[] = {q, k, v};
  const auto placed = [&](const Tensor& x) { return to(to(x, dtype), device); };
  q = placed(q), k = placed(k), v = placed(v);
  if (device.is_cpu() && (d_o || options.backward == Backward::taped)) check_fits(*plan, q, k, options.backward);
  program::Outputs outputs(s.out);
  bool finite = true;
  for (const auto& [option, path, x] :
       {std::tuple("--q", s.q, as_read[0]), {"--k", s.k, as_read[1]}, {"--v", s.v, as_read[2]}, {"--d-o", s.d_o, d_o}})
    warn_about(option, path, x, finite);
  warn_about(*plan);

  std::vector<std::pair<std::string, Tensor>> results;
  if (s.ranks > 1) {
    results = over_ranks(static_cast<int>(s.ranks), *plan, q, k, v, d_o ? placed(d_o) : d_o, options);
  } else {
    const AttentionResult forward = attention_with_lse(q, k, v, plan, options);
    results.emplace_back("o", forward.o);
    results.emplace_back("lse", forward.lse);
  }
  if (d_o && s.ranks == 1) {
    Tape tape;
    for (const Tensor& x : {q, k, v}) tape.watch(x);
    const Tensor o = attention(q, k, v, plan, options);
    // Where nothing attends to anything, o may be a constant to the tape.
    const Gradients g = tape.knows(o) ? tape.backward(o, placed(d_o)) : Gradients();
    const auto gradient = [&](const Tensor& x) { return g.has(x) ? g[x] : zeros_like(x); };
    results.emplace_back("dq", gradient(q));
    results.emplace_back("dk", gradient(k));
    results.emplace_back("dv", gradient(v));
  }
  for (const Fallback& f : attention_fallbacks())
    warn(std::string(name_of(f.asked)) + " ran as " + std::string(name_of(f.ran)) + ": " + f.reason);

  for (auto& [name, x] : results) {
    x = to(to(x, Device{}), stored == DType::f64 ? DType::f64 : DType::f32);
    if (const auto odd = finite ? program::not_finite(x, name != "lse") : std::nullopt)
      fail_with(Code::not_a_number, name, ": ", *odd, ", though all inputs are finite: a step on the way is beyond ",
                dtype, dtype == DType::f64 ? "; scale the inputs down" : "; try --dtype f64, or scale the inputs down");
  }

  const TileStats tiles = plan->stats();
  std::cout << "plan   " << to_string(plan->spec().order) << ", " << to_string(plan->spec().pattern) << ", causal "
            << s.causal << "; " << tiles.full + tiles.partial << " of " << tiles.total
            << " tiles of 128 x 128 touched, " << tiles.full << " of them full\n";
  for (const auto& [name, x] : results) write_npy(outputs.stage(name + ".npy"), x);
  outputs.commit();
  for (const auto& [name, x] : results)
    std::cout << "wrote  " << outputs.directory() << '/' << name << ".npy  " << x.dtype() << x.shape() << '\n';
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
