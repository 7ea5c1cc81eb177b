// Prints hashes of what attention computes over fuzzed configurations, so that two builds can be
// compared: what a refactoring must not change are these bits. Knows the public header alone, since
// files move.
//
//   hashes [--device cpu|cuda] [--count N] [--seed S]
//
// One line for each configuration, mode and type. Configuration i depends on the seed and i alone.
// All NaNs are equal.
#include <hilt/hilt.h>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

using namespace hilt;

namespace {

/// SplitMix64: a seed is a sequence, on every platform.
struct Random {
  std::uint64_t state;

  Random(std::uint64_t seed, Index stream) : state(seed * 0x9E3779B97F4A7C15u ^ static_cast<std::uint64_t>(stream)) {
    state = next();
  }
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  Index below(Index n) { return static_cast<Index>(next() % static_cast<std::uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T> T pick(const std::vector<T>& x) { return x[static_cast<std::size_t>(below(std::ssize(x)))]; }
  std::string word(const std::vector<std::string>& x) { return pick(x); }
  std::string number(const std::vector<Index>& x) { return std::to_string(pick(x)); }
  std::string sides(const std::vector<Index>& x) { return std::to_string(pick(x)).append("x").append(number(x)); }
  /// Close to normal, and exact: four uniform numbers, added.
  double normal() {
    const std::uint64_t z = next(), sum = (z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48);
    return (static_cast<double>(sum) * 0x1p-16 - 2) * 1.75;
  }
};

// ---- configurations
// ------------------------------------------------------------------------------------

/// What to compute, in words where the library has words. It refuses some, and how it does must
/// stay too.
struct Config {
  Index length = 1, heads = 1, kv_heads = 1, batch = 1, dim = 1;
  std::string order, pattern, dilation_mode, causality, work_order = "row";
  Pattern blocks;  // branches beside the pattern's
  bool in_order = false, packed = false, large = false, with_nan = false;
  std::string layouts = "dddd";  // of q, k, v and the cotangent: see laid_out
  AttentionOptions options;
};

std::string text_of(const Config& c) {
  std::ostringstream s;
  s << c.order << ' ' << c.pattern << (c.pattern.empty() || c.blocks.empty() ? "" : "+") << to_string(c.blocks) << ' '
    << c.dilation_mode << " causal=" << c.causality << " work=" << c.work_order << " B" << c.batch << " L" << c.length
    << " H" << c.heads << '/' << c.kv_heads << " D" << c.dim << " layouts=" << c.layouts;
  if (c.options.dropout > 0) s << " dropout=" << c.options.dropout << " first=" << c.options.first_batch;
  if (c.options.scale) s << " scale=" << *c.options.scale;
  s << (c.large ? " large" : "") << (c.with_nan ? " nan" : "");
  s << (c.packed ? " packed" : "") << (c.in_order ? " in_order" : "");
  return s.str();
}

PlanSpec spec_of(const Config& c) {
  PlanSpec spec{.length = c.length, .heads = c.heads, .order = parse_order(c.order, c.length)};
  spec.pattern = c.pattern.empty() ? Pattern{} : parse_pattern(c.pattern);
  spec.pattern.insert(spec.pattern.end(), c.blocks.begin(), c.blocks.end());
  spec.dilation_mode = parse_dilation_mode(c.dilation_mode), spec.causality = parse_causality(c.causality);
  spec.work_order = parse_work_order(c.work_order), spec.in_order = c.in_order;
  return spec;
}

// ---- drawing one
// ---------------------------------------------------------------------------------------

/// Sets the length; for half of them returns the grid that has so many cells.
std::string draw_length(Random& r, Config& c, bool box_allowed, bool on_gpu) {
  if (r.chance(50)) {
    const Index tiles = 1 + r.below(on_gpu ? 16 : 4), n = tiles * 128;
    c.length = r.pick<Index>({1, 2, 3, 5, 7, 13, 31, 61, 64, 97, 191, 251, 256, 257, 509, n, n, n, n - 1, n + 1});
    if (on_gpu && r.chance(60)) c.length = n;
    return "";
  }
  const std::vector<Index> list{1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 16, 16, 19, 20, 23, 32, 32, 40};
  Index frames = box_allowed && r.chance(15) ? 2 + r.below(4) : 1, height = 0, width = 0;
  do {
    height = r.pick(list), width = r.pick(list);
    if (on_gpu && frames == 1) height <<= r.below(3), width <<= r.below(3);
  } while (frames * height * width > (on_gpu ? 2112 : 528));
  c.length = frames * height * width + (r.chance(2) ? 1 : 0);  // one more is refused
  return (frames > 1 ? std::to_string(frames) + 'x' : "") + std::to_string(height) + 'x' + std::to_string(width);
}

void draw_order(Random& r, Config& c, bool on_gpu) {
  c.order = r.word({"row", "snake", "morton", "tiles", "hilbert", "hilbert", "hilbert"});
  const bool tiles = c.order == "tiles", hilbert = c.order == "hilbert";
  const std::string grid = draw_length(r, c, hilbert || c.order == "row", on_gpu);
  if (!grid.empty()) c.order += ':' + grid;
  if (tiles && (!grid.empty() || r.chance(50))) c.order += (grid.empty() ? ':' : '/') + r.sides({1, 2, 3, 4, 8, 16});
  if (hilbert && r.chance(15)) c.order += ",steps=unit";
  const Index scope = r.below(8);
  if (scope == 0) c.order += ",scope=order-only";
  if (scope == 1) c.order += ",scope=segment";
  if (scope == 2) c.order += ",chunk=" + r.number({1, 5, 16, 64, 100, 128, 256, c.length, c.length + 3});
}

std::string draw_segment(Random& r, Index length, std::string size) {
  if (size.empty())
    size = r.number({1, 2, 3, 8, 16, 31, 32, 48, 64, 64, 127, 128, 128, 129, 256, length, 2 * length, length / 3 + 1});
  if (r.chance(45)) return "segment:" + size;
  const Index dilation = r.pick<Index>({2, 2, 3, 4, 4, 5, 8, 16, length + 1});
  const std::string text = "segment:" + size + ",dilation=" + std::to_string(dilation);
  if (r.chance(30)) return text + ",offset=head";
  return r.chance(50) ? text : text + ",offset=" + std::to_string(r.chance(95) ? r.below(dilation) : dilation);
}

Branch draw_blocks(Random& r, Index length) {
  const Index size = std::max(r.pick<Index>({1, 5, 16, 16, 32, 64, 64, 128, 129}), length / 24 + 1);
  const Index n = (length + size - 1) / size, builder = r.below(4), few = r.below(3);
  if (builder == 0) return blocks(size, local_blocks(n, few));
  if (builder == 1) return blocks(size, dilated_blocks(n, {1 + few, 4}));
  if (builder == 2) return blocks(size, global_local_blocks(n, few, 1));
  BlockPairs pairs;
  for (std::int32_t i = 0; i < n; ++i)
    for (std::int32_t j = 0; j < n; ++j)
      if (r.chance(30)) pairs.emplace_back(i, j);
  return blocks(size, pairs);
}

/// Any branch that has a text.
std::string draw_branch(Random& r, Index length) {
  const std::string kind =
      r.word({"dense", "segment", "slide", "neighborhood", "window2d", "slide2d", "neighborhood2d"});
  if (kind == "dense") return kind;
  if (kind == "segment") return draw_segment(r, length, "");
  if (kind == "slide") return kind + ':' + r.number({0, 1, 3, 9, 20, 64, 127, 128, length, length * 2});
  if (kind == "neighborhood") return kind + ':' + r.number({1, 3, 7, 7, 31, 31, 65, 65, 129, 129, length | 1, 4});
  if (kind == "window2d") return kind + ':' + r.sides({1, 2, 3, 4, 7, 8, 16, 40});
  return kind + ':' + (kind == "slide2d" ? r.sides({0, 1, 2, 3, 5, 16}) : r.sides({1, 3, 3, 5, 7, 9}));
}

void draw_pattern(Random& r, Config& c) {
  c.dilation_mode = r.word({"all_queries", "all_queries", "all_queries", "longnet", "head_groups", "residue"});
  const bool by_segment = c.order.ends_with("scope=segment");
  const int others = by_segment ? 5 : c.dilation_mode == "all_queries" ? 80 : 15;  // percent
  const std::string size = by_segment ? r.number({8, 16, 48, 64, 128}) : "";
  for (Index branches = r.pick<Index>({1, 1, 1, 1, 2, 2, 3}); branches > 0; --branches) {
    const bool other = r.chance(others);
    if (other && r.chance(12)) {
      c.blocks.push_back(draw_blocks(r, c.length));
      continue;
    }
    if (!c.pattern.empty()) c.pattern += '+';
    c.pattern += other ? draw_branch(r, c.length) : draw_segment(r, c.length, size);
  }
  if (!c.blocks.empty()) c.work_order = r.word({"row", "diagonal", "hilbert", "auto"});
}

/// Batch, heads and features whose dense product is not more work than one has time for.
void draw_sizes(Random& r, Config& c, bool on_gpu) {
  const std::vector<Index> small{1, 3, 8, 16, 20, 32, 64, 96, 128};
  const std::vector<Index> on_gpus{16, 32, 64, 64, 64, 64, 64, 80, 128, 128, 128, 128, 128, 96, 1, 20, 33, 256};
  const Index most = on_gpu ? 6'000'000'000 : 150'000'000;
  const Index fewest = c.dilation_mode == "head_groups" && r.chance(90) ? 3 : 1;  // heads: one a branch
  do {
    c.batch = r.pick<Index>({0, 1, 1, 1, 1, 2, 2, 3, 3});
    c.heads = fewest + r.below(5 - fewest), c.dim = r.pick(on_gpu ? on_gpus : small);
  } while (std::max<Index>(c.batch, 1) * c.heads * c.dim * c.length * c.length > most);
  c.kv_heads = c.heads;
  if (r.chance(55)) return;
  do c.kv_heads = 1 + r.below(c.heads);
  while (c.heads % c.kv_heads != 0 && !r.chance(3));
}

Config draw(std::uint64_t seed, Index i, bool on_gpu) {
  Random r(seed, i);
  Config c;
  draw_order(r, c, on_gpu);
  draw_pattern(r, c);
  draw_sizes(r, c, on_gpu);
  c.causality = r.word({"none", "none", "none", "none", "token", "token", "token", "token", "curve"});
  if (c.order.ends_with("order-only") && c.causality == "curve") c.causality = "token";  // they contradict
  c.in_order = r.chance(12), c.packed = c.kv_heads == c.heads && r.chance(15);
  for (char& layout : c.layouts)
    if (r.chance(30)) layout = "htf"[r.below(3)];
  c.large = r.chance(7), c.with_nan = r.chance(6);
  c.options.key = RandomKey{seed, r.next()}, c.options.first_batch = r.below(3);
  if (r.chance(15)) c.options.dropout = 0.1;
  if (r.chance(20)) c.options.scale = r.pick<double>({1, 0.5, 0.125, -0.5, 0});
  return c;
}

// ---- what it is computed from, and what comes out
// ------------------------------------------------------

struct Inputs {
  Tensor q, k, v, d_o, qkv;
};

/// In f64, on the CPU.
Inputs draw_inputs(const Config& c, std::uint64_t seed, Index i) {
  Random r(~seed, i);
  const auto tensor = [&](Index heads, double size = 1, bool with_nan = false) {
    std::vector<double> x(static_cast<std::size_t>(c.batch * c.length * heads * c.dim));
    for (double& value : x) value = r.normal() * size;
    if (with_nan && !x.empty()) x[static_cast<std::size_t>(r.below(std::ssize(x)))] = std::nan("");
    return from_values(x, {c.batch, c.length, heads, c.dim});
  };
  Inputs x;
  x.q = tensor(c.heads, c.large ? 1e4 : 1), x.d_o = tensor(c.heads);
  x.k = tensor(c.kv_heads, 1, c.with_nan), x.v = tensor(c.kv_heads);
  return x;
}

/// The same numbers in that type on that device: dense, heads first, or with -7 after every token
/// or feature.
Tensor laid_out(const Tensor& x, DType dtype, Device device, char layout) {
  const Tensor typed = to(x, dtype);
  if (layout == 'd') return moved(typed, device);
  if (layout == 'h') return permute(moved(contiguous(permute(typed, {0, 2, 1, 3})), device), {0, 2, 1, 3});
  const int axis = layout == 't' ? 2 : 4;
  const Tensor thin = unsqueeze(typed, axis);
  return squeeze(slice(moved(cat({thin, full(thin.shape(), -7, dtype)}, axis), device), axis, 0, 1), axis);
}

Inputs made_ready(const Config& c, const Inputs& x, DType dtype, Device device) {
  const auto ready = [&](const Tensor& t, std::size_t i) { return laid_out(t, dtype, device, c.layouts[i]); };
  Inputs y{ready(x.q, 0), ready(x.k, 1), ready(x.v, 2), ready(x.d_o, 3), {}};
  if (!c.packed) return y;
  y.qkv = moved(to(cat({unsqueeze(x.q, 2), unsqueeze(x.k, 2), unsqueeze(x.v, 2)}, 2), dtype), device);
  const auto part = [&](Index i) { return squeeze(slice(y.qkv, 2, i, i + 1), 2); };
  y.q = part(0), y.k = part(1), y.v = part(2);
  return y;
}

struct Result {
  Tensor o, lse, dq, dk, dv;
};

Result compute(const Config& c, const Inputs& x, Backward mode) {
  const PlanPtr plan = make_plan(spec_of(c));
  AttentionOptions options = c.options;
  options.backward = mode;
  const Tensor lse = attention_with_lse(x.q, x.k, x.v, plan, options).lse;
  Tape tape;
  for (const Tensor& t : {x.q, x.k, x.v}) tape.watch(t);
  if (c.packed) tape.watch(x.qkv);
  const Tensor o = c.packed ? attention(x.qkv, plan, options) : attention(x.q, x.k, x.v, plan, options);
  const Gradients g = tape.backward(o, x.d_o);
  const auto d = [&](const Tensor& t, Index i) { return c.packed ? slice(g[x.qkv], 2, i, i + 1) : g[t]; };
  return {o, lse, d(x.q, 0), d(x.k, 1), d(x.v, 2)};
}

/// The same over ranks that are threads.
Result compute_on_ranks(const Config& c, const Inputs& x, int ranks, Transport transport, Dealing dealing) {
  const PlanSpec spec = spec_of(c);
  Result out;
  run_ranks(ranks, [&](Comm& comm) {
    const ShardPlanPtr shard = make_shard_plan(spec, ranks, comm.rank(), transport, dealing);
    const auto mine = [&](const Tensor& t) { return rows_of_rank(t, *shard, comm.rank()); };
    const auto whole = [&](const Tensor& t) { return whole_of_rows(t, *shard, comm); };
    const Tensor q = mine(x.q), k = mine(x.k), v = mine(x.v);
    const Tensor lse = ring_attention_with_lse(q, k, v, shard, comm, c.options).lse;
    Tape tape;
    for (const Tensor& t : {q, k, v}) tape.watch(t);
    const Tensor o = ring_attention(q, k, v, shard, comm, c.options);
    const Gradients g = tape.backward(o, mine(x.d_o));
    const auto d = [&](const Tensor& t) { return whole(g.has(t) ? g[t] : zeros_like(t)); };
    const Result r{whole(o), whole(unsqueeze(permute(lse, {0, 2, 1}), -1)), d(q), d(k), d(v)};
    if (comm.rank() == 0) out = r;
  });
  return out;
}

// ---- hashes
// --------------------------------------------------------------------------------------------

/// FNV-1a of words instead of bytes, with the high bits brought down.
struct Hash {
  std::uint64_t h = 0xCBF29CE484222325u;

  void add(std::uint64_t word) { h = (h ^ word) * 0x100000001B3u, h ^= h >> 29; }
  Hash& add(std::string_view text) {
    for (const char c : text) add(std::uint64_t{static_cast<unsigned char>(c)});
    return *this;
  }
  std::string hex() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(h));
    return text;
  }
};

std::string hash_of(const Tensor& there) {
  constexpr std::array<std::uint64_t, 4> kInfinity{0x7FF0000000000000, 0x7F800000, 0x7F80, 0x7C00};  // by DType
  const Tensor x = dense(moved(there, Device{}));
  const std::size_t bytes = size_of(x.dtype());
  const std::uint64_t magnitude = ~std::uint64_t{0} >> (65 - 8 * bytes);  // all bits but the sign
  Hash h;
  h.add(name_of(x.dtype()));
  for (const Index extent : x.shape()) h.add(static_cast<std::uint64_t>(extent));
  for (Index i = 0; i < x.numel(); ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, x.raw() + static_cast<std::size_t>(i) * bytes, bytes);
    h.add((bits & magnitude) > kInfinity.at(static_cast<std::size_t>(x.dtype())) ? magnitude : bits);
  }
  return h.hex();
}

// ---- the run
// -------------------------------------------------------------------------------------------

struct Run {
  Device device;
  Index count = -1, lines = 0, refused = 0, fell_back = 0, over_ranks = 0;
  std::uint64_t seed = 1;
  Hash total;

  /// Computes and prints one line, of the result or of how it was refused; then false.
  template <class F> bool line(Index i, const std::string& mode, DType dtype, std::string note, F&& computed) {
    std::string out = std::to_string(i) + ' ' + mode + ' ' + std::string(name_of(dtype));
    const Index before = refused;
    clear_attention_fallbacks();
    try {
      const Result r = computed();
      out += " o=" + hash_of(r.o) + " lse=" + hash_of(r.lse);
      out += " dq=" + hash_of(r.dq) + " dk=" + hash_of(r.dk) + " dv=" + hash_of(r.dv);
    } catch (const Error& e) {
      if (e.code() != Code::usage) throw;  // not a refusal: it failed
      out += " error=" + Hash().add(e.what()).hex();
      note += std::string("; ") + e.what(), ++refused;
    }
    if (!attention_fallbacks().empty()) note += "; fell back: " + attention_fallbacks().back().reason, ++fell_back;
    for (char& c : note)
      if (c == '#' || c == '\n') c = ' ';
    out += "  # " + note + '\n';
    std::cout << out;
    total.add(out), ++lines;
    return refused == before;
  }

  void on_ranks(Index i, const Config& c, const Inputs& x, DType dtype) {
    Random r(seed, ~i);
    for (const int ranks : {2, 3}) {
      const std::string how = r.word({"ring", "gather"}), dealing = r.word({"contiguous", "balanced", "auto"});
      over_ranks += line(i, "ring" + std::to_string(ranks), dtype, text_of(c) + ' ' + how + ' ' + dealing,
                         [&] { return compute_on_ranks(c, x, ranks, parse_transport(how), parse_dealing(dealing)); });
    }
  }

  void one(Index i) {
    const Config c = draw(seed, i, device.is_cuda());
    const Inputs drawn = draw_inputs(c, seed, i);
    using enum DType;
    for (const DType dtype : device.is_cpu() ? std::array{f64, f32, bf16} : std::array{f32, bf16, f16}) {
      const Inputs x = made_ready(c, drawn, dtype, device);
      bool accepted = true;
      for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused})
        accepted = line(i, std::string(name_of(mode)), dtype, text_of(c), [&] { return compute(c, x, mode); });
      if (accepted && device.is_cpu() && i % 12 == 0) on_ranks(i, c, x, dtype);
    }
  }

  void all() {
    if (count < 0) count = device.is_cpu() ? 300 : 200;
    for (Index i = 0; i < count; ++i) one(i);
    std::cout << "total=" << total.hex() << " configurations=" << count << " lines=" << lines << " refused=" << refused
              << " fell_back=" << fell_back << " over_ranks=" << over_ranks << '\n';
  }
};

}  // namespace

int main(int argc, char** argv) try {
  check_version();
  Run run;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--device") run.device = device_named(value);
    else if (flag == "--count") run.count = std::stoll(value);
    else if (flag == "--seed") run.seed = std::stoull(value);
    else fail("no flag '", flag, "'; there are --device, --count and --seed");
  }
  run.all();
  return std::cout.flush() ? 0 : 1;
} catch (const std::exception& e) {
  std::cerr << "hashes: " << e.what() << '\n';
  return 1;
}
