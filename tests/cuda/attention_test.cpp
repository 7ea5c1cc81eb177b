// Attention on a GPU where fuzzing does not reach: the kernels for Hopper, those for the tensor
// cores of any GPU, long groups, large head dims. The referee is the plain kernel in f32 on the
// same numbers, which fuzzing holds against the definitions in f64.
#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include "core/cuda/context.h"
#include "core/random.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/call.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

const Device kGpu{Device::Kind::cuda, 0};

struct Case {
  std::string pattern, order = "hilbert";
  Index batch = 1, length = 4096, heads = 2, kv_heads = 2, dim = 64;
  bool packed = false;
  DilationMode mode = DilationMode::all_queries;
  Causality causality = Causality::none;
  DType type = DType::bf16;
  double dropout = 0;
  std::string documents = "";
  Index queries = 0;  // the last so many ask; 0: all
};
std::ostream& operator<<(std::ostream& os, const Case& c) {
  return os << c.pattern << ' ' << c.order << " B " << c.batch << " L " << c.length << " H " << c.heads << '/'
            << c.kv_heads << " D " << c.dim << (c.packed ? " packed" : "") << ' ' << name_of(c.mode) << " causal "
            << name_of(c.causality) << ' ' << c.type << " dropout " << c.dropout << " documents '" << c.documents
            << "' queries " << c.queries;
}

PlanPtr plan_of(const Case& c) {
  PlanSpec spec;
  spec.length = c.length, spec.heads = c.heads, spec.pattern = parse_pattern(c.pattern),
  spec.order = parse_order(c.order, c.length);
  spec.dilation_mode = c.mode;
  spec.causality = c.causality;
  if (!c.documents.empty()) spec.documents = parse_documents(c.documents);
  if (c.queries > 0) spec.queries = query_run(c.length - c.queries, c.queries);
  return make_plan(spec);
}

struct Inputs {
  Tensor q, k, v, qkv, d_o;
};
Inputs inputs_of(const Case& c) {
  const Shape wide{c.batch, c.queries > 0 ? c.queries : c.length, c.heads, c.dim},
      narrow{c.batch, c.length, c.kv_heads, c.dim};
  const auto x = [&](const Shape& s, std::uint64_t stream) { return randn(s, {11, stream}, c.type, kGpu); };
  Inputs in{x(wide, 1), x(narrow, 2), x(narrow, 3), {}, x(wide, 4)};
  if (c.packed) in.qkv = cat({unsqueeze(in.q, 2), unsqueeze(in.k, 2), unsqueeze(in.v, 2)}, 2);
  return in;
}
Inputs in_f32(const Inputs& in) {
  return {to(in.q, DType::f32), to(in.k, DType::f32), to(in.v, DType::f32), in.qkv ? to(in.qkv, DType::f32) : Tensor{},
          to(in.d_o, DType::f32)};
}

struct Result {
  Tensor o, lse;
  std::vector<Tensor> dx;
};
Result play(const Inputs& in, const PlanPtr& plan, double dropout = 0) {
  AttentionOptions how;
  if (dropout > 0) how.dropout = dropout, how.key = RandomKey{3, 4};
  Result r;
  r.lse = attention_with_lse(in.q, in.k, in.v, plan, how).lse;
  Tape tape;
  if (in.qkv) {
    tape.watch(in.qkv);
    r.o = attention(in.qkv, plan, how);
    r.dx = {tape.backward(r.o, in.d_o)[in.qkv]};
  } else {
    for (const Tensor* t : {&in.q, &in.k, &in.v}) tape.watch(*t);
    r.o = attention(in.q, in.k, in.v, plan, how);
    const Gradients g = tape.backward(r.o, in.d_o);
    r.dx = {g[in.q], g[in.k], g[in.v]};
  }
  return r;
}

/// Memory that the next tensors of these sizes get is full of NaN.
void poison(const Case& c) {
  std::vector<Tensor> dirty;
  const Index n = c.batch * c.length * c.heads * c.dim;
  for (Index size : {n, 3 * n, c.batch * c.length * c.heads, c.batch * c.length * c.kv_heads * c.dim})
    for (DType type : {DType::bf16, DType::f32})  // the bits of that NaN are one in f16 too
      for (int i = 0; i < 3; ++i) dirty.push_back(full({size}, std::numeric_limits<double>::quiet_NaN(), type, kGpu));
}

double relative(const Tensor& got, const Tensor& want) {
  return global_norm(std::vector<Tensor>{sub(to(got, DType::f32), want)}) / global_norm(std::vector<Tensor>{want});
}
std::vector<std::uint8_t> bits(const Tensor& x) {
  const Tensor y = clone(x);  // from its storage's first byte on
  return Tensor(y.storage(), {static_cast<Index>(y.bytes())}, DType::u8).to_vector<std::uint8_t>();
}

class OnGpuAttention : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
    if (!cuda::properties(0).is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  }
};

std::vector<Case> whole_groups() {
  std::vector<Case> out;
  for (Index dim : {64, 128}) {
    for (const char* order : {"hilbert", "row", "snake"}) {
      out.push_back({.pattern = "segment:128", .order = order, .dim = dim});
      out.push_back({.pattern = "segment:256", .order = order, .dim = dim});
      out.push_back({.pattern = "segment:2048,dilation=16", .order = order, .dim = dim});
    }
    out.push_back({.pattern = "segment:512", .dim = dim});
    out.push_back({.pattern = "segment:384", .length = 128 * 3 * 7, .dim = dim});
    out.push_back({.pattern = "segment:1024,dilation=4,offset=3", .dim = dim});
    out.push_back({.pattern = "segment:1024,dilation=8,offset=head", .heads = 3, .kv_heads = 3, .dim = dim});
    out.push_back({.pattern = "segment:2048", .dim = dim});
    out.push_back({.pattern = "segment:2048,dilation=4", .dim = dim});
    out.push_back({.pattern = "segment:4096,dilation=2", .batch = 2, .dim = dim, .mode = DilationMode::longnet});
    out.push_back({.pattern = "segment:512,dilation=4", .batch = 2, .dim = dim, .mode = DilationMode::residue});
    out.push_back({.pattern = "dense", .order = "row", .length = 1024, .dim = dim});
    out.push_back({.pattern = "dense", .batch = 3, .length = 128, .heads = 5, .kv_heads = 5, .dim = dim});
    out.push_back({.pattern = "segment:128", .batch = 1, .length = 128, .heads = 1, .kv_heads = 1, .dim = dim});
    out.push_back({.pattern = "segment:128", .batch = 2, .heads = 6, .kv_heads = 2, .dim = dim});
    out.push_back(
        {.pattern = "segment:128", .batch = 2, .length = 16384, .heads = 4, .kv_heads = 4, .dim = dim, .packed = true});
    out.push_back(
        {.pattern = "segment:1024", .batch = 2, .length = 2048, .heads = 4, .kv_heads = 4, .dim = dim, .packed = true});
  }
  return out;
}

/// Masked tilings of whole tiles.
std::vector<Case> masked() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (Index dim : {64, 128}) {
    out.push_back({.pattern = "dense", .order = "row", .length = 2048, .dim = dim, .causality = token});
    out.push_back({.pattern = "dense", .order = "hilbert", .batch = 2, .length = 1024, .dim = dim, .causality = token});
    out.push_back({.pattern = "dense",
                   .order = "row",
                   .batch = 1,
                   .length = 128,
                   .heads = 3,
                   .kv_heads = 3,
                   .dim = dim,
                   .causality = token});
    out.push_back({.pattern = "slide:511", .order = "row", .length = 2048, .dim = dim, .causality = token});
    out.push_back({.pattern = "segment:512", .dim = dim, .causality = token});
    out.push_back({.pattern = "segment:1024,dilation=4", .order = "row", .dim = dim, .causality = token});
    out.push_back({.pattern = "slide:100", .order = "row", .dim = dim});
    out.push_back(
        {.pattern = "neighborhood:301", .order = "hilbert", .batch = 2, .dim = dim, .causality = Causality::curve});
    out.push_back({.pattern = "neighborhood2d:17x17", .order = "hilbert", .dim = dim});
    out.push_back({.pattern = "window2d:16x16", .order = "row", .dim = dim});
    // more masks than a plan has room for: no two rows of 113 begin at the same place of a cell
    out.push_back({.pattern = "neighborhood2d:33x33", .order = "hilbert:113x113", .length = 12769, .dim = dim});
    out.push_back({.pattern = "slide2d:8x3", .order = "hilbert", .dim = dim, .packed = true, .causality = token});
    out.push_back({.pattern = "slide2d:6x3,stride=2,causal=1x0", .order = "hilbert", .dim = dim});
  }
  return out;
}
/// Every head dim, type, length and sharing of key heads that those for Hopper take.
std::vector<Case> of_every_size() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (const DType type : {DType::bf16, DType::f16})
    for (const Index dim : {8, 32, 40, 64, 80, 96, 128, 160, 192, 256}) {
      const auto add = [&](Case c) {
        c.dim = dim, c.type = type;
        out.push_back(c);
      };
      add({.pattern = "dense", .order = "row", .length = 1000, .heads = 4, .kv_heads = 2, .causality = token});
      add({.pattern = "dense", .order = "row", .length = 1088, .heads = 4, .kv_heads = 2, .causality = token});
      add({.pattern = "dense", .batch = 2, .length = 333, .heads = 3, .kv_heads = 1});
      add({.pattern = "segment:64", .batch = 2, .length = 1037, .heads = 4, .kv_heads = 2, .causality = token});
      add({.pattern = "segment:100", .length = 1037, .heads = 3, .kv_heads = 1});
      add({.pattern = "segment:16", .length = 2000});
      add({.pattern = "segment:200", .batch = 2, .length = 1000});
      add({.pattern = "segment:256", .length = 1000});
      add({.pattern = "segment:256,tail=borrow", .length = 1000});
      add({.pattern = "segment:300", .length = 1000, .causality = token});
      add({.pattern = "segment:512,dilation=4,offset=1", .length = 1024, .mode = DilationMode::longnet});
      add({.pattern = "segment:1024,dilation=64", .length = 3000, .heads = 4, .kv_heads = 1});
      add({.pattern = "neighborhood2d:7x5", .order = "hilbert:40x25", .batch = 2, .length = 1000, .packed = true});
      add({.pattern = "neighborhood2d:7x7", .order = "snake:29x37", .length = 1073, .causality = token});
      add({.pattern = "window2d:8x8", .order = "hilbert:48x48", .length = 2304, .heads = 4, .kv_heads = 2});
    }
  return out;
}
/// Sets of more than one box or on three axes, and rows of several documents.
std::vector<Case> of_parts() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (const DType type : {DType::bf16, DType::f16})
    for (const Index dim : {24, 40, 64, 128, 256}) {
      const auto add = [&](Case c) {
        c.dim = dim, c.type = type;
        out.push_back(c);
      };
      add({.pattern = "slide:60|blocks:64@global_local:1:1", .order = "row", .batch = 2, .length = 1000});
      add({.pattern = "segment:100|neighborhood2d:5x5", .order = "hilbert:32x40", .length = 1280, .causality = token});
      add({.pattern = "neighborhood3d:3x5x5", .order = "hilbert:8x12x12", .length = 1152, .heads = 4, .kv_heads = 2});
      add({.pattern = "window3d:2x4x4", .order = "row:6x12x16", .length = 1152});
      add({.pattern = "dense",
           .order = "row",
           .batch = 2,
           .length = 1500,
           .causality = token,
           .documents = "700,1,60,300,400"});
      add({.pattern = "slide:50",
           .order = "row",
           .length = 1500,
           .kv_heads = 1,
           .documents = "700,1,60,60,60,300,200"});
      add({.pattern = "segment:64", .batch = 2, .length = 1000, .documents = "300,16x24,300/1,900"});
      add({.pattern = "segment:64,tail=borrow", .length = 1000, .causality = token, .documents = "300,600"});
      add({.pattern = "neighborhood2d:5x5", .length = 1000, .documents = "16x24,20x30"});
      add({.pattern = "segment:64+segment:256,dilation=2", .order = "row", .length = 1000, .documents = "300,600"});
    }
  return out;
}
/// Few owners with many steps, which are cut into parts.
std::vector<Case> of_few_owners() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (const DType type : {DType::bf16, DType::f16})
    for (const Index dim : {32, 64, 96, 128, 192}) {
      const auto add = [&](Case c) {
        c.dim = dim, c.type = type, c.batch = 7;
        out.push_back(c);
      };
      add({.pattern = "segment:2048,dilation=64", .heads = 4, .kv_heads = 2});
      add({.pattern = "segment:1024,dilation=33", .order = "row", .length = 2000, .causality = token, .dropout = 0.1});
      add({.pattern = "dense", .order = "row", .causality = token, .queries = 1});
      add({.pattern = "dense", .order = "row", .heads = 6, .kv_heads = 2, .causality = token, .queries = 64});
      add({.pattern = "dense", .length = 5000, .causality = token, .dropout = 0.2, .queries = 100});
    }
  return out;
}
std::vector<Case> all_cases() {
  std::vector<Case> out = whole_groups();
  for (const auto& more : {masked(), of_every_size(), of_parts(), of_few_owners()})
    out.insert(out.end(), more.begin(), more.end());
  return out;
}

/// The worst of what was seen.
struct Worst {
  double o = 0, lse = 0, dx = 0;
};

/// Relative errors against the plain kernel in f32. What is allowed is told in terms of bf16; f16
/// has three bits more.
void agrees_with_the_plain_kernel(const Case& c, Worst& worst) {
  const PlanPtr plan = plan_of(c);
  const Inputs in = inputs_of(c);
  const Result want = play(in_f32(in), plan, c.dropout);
  poison(c);
  const Result got = play(in, plan, c.dropout);
  // Rows of bf16: half a unit in the last place of 8 bits, of P, dS and the results.
  const double unit = c.type == DType::f16 ? 0x1p-3 : 1;
  worst.o = std::max(worst.o, relative(got.o, want.o) / unit);
  EXPECT_LT(relative(got.o, want.o), 4e-3 * unit);
  const std::vector<float> lse = got.lse.to_vector<float>(), lse_want = want.lse.to_vector<float>();
  double off = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (lse[i] == lse_want[i]) continue;  // -inf where a row has no key
    if (!(std::abs(lse[i] - lse_want[i]) <= off)) off = std::abs(lse[i] - lse_want[i]);
  }
  EXPECT_LT(off, 1e-4);
  worst.lse = std::max(worst.lse, off);
  for (std::size_t i = 0; i < got.dx.size(); ++i) {
    worst.dx = std::max(worst.dx, relative(got.dx[i], want.dx[i]) / unit);
    EXPECT_LT(relative(got.dx[i], want.dx[i]), 5e-3 * unit) << "gradient " << i;
  }
}

TEST_F(OnGpuAttention, AgreesWithThePlainKernel) {
  Worst worst;
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(testing::Message() << c);
    const PlanPtr plan = plan_of(c);
    const Inputs in = inputs_of(c);
    clear_attention_routes();
    attention_with_lse(in.q, in.k, in.v, plan);
    for (const AttentionRoute& r : attention_routes()) EXPECT_EQ(r.route, "hopper") << r.reason;
    agrees_with_the_plain_kernel(c, worst);
  }
  std::cout << "worst relative error: o " << worst.o << ", gradients " << worst.dx << "; lse absolute " << worst.lse
            << std::endl;
}

// Rows of a panel and a half: few enough for compute-sanitizer to see what is read beyond them.
TEST_F(OnGpuAttention, HeadDim96) {
  Worst worst;
  for (const Case& c : of_every_size())
    if (c.dim == 96) {
      SCOPED_TRACE(testing::Message() << c);
      agrees_with_the_plain_kernel(c, worst);
    }
}

void repeats_bit_for_bit(const Case& c, Index times) {
  const PlanPtr plan = plan_of(c);
  const Inputs in = inputs_of(c);
  const Result first = play(in, plan, c.dropout);
  Tensor worst = zeros({}, DType::f32, kGpu);  // looked at once: to wait each time would be most of the time
  Result again;
  for (Index i = 0; i < times; ++i) {
    again = play(in, plan, c.dropout);
    const auto note = [&](const Tensor& x, const Tensor& y) {
      worst = maximum(worst, max(abs(sub(to(x, DType::f32), to(y, DType::f32)))));
    };
    note(again.o, first.o), note(exp(again.lse), exp(first.lse));  // -inf where nobody is attended to
    for (std::size_t k = 0; k < first.dx.size(); ++k) note(again.dx[k], first.dx[k]);
  }
  ASSERT_EQ(worst.item(), 0);
  ASSERT_EQ(bits(again.o), bits(first.o));
  ASSERT_EQ(bits(again.lse), bits(first.lse));
  for (std::size_t k = 0; k < first.dx.size(); ++k) ASSERT_EQ(bits(again.dx[k]), bits(first.dx[k])) << "gradient " << k;
}

Index asked_for(const char* name, Index otherwise) {
  const char* const asked = std::getenv(name);
  return asked ? std::atoll(asked) : otherwise;
}
/// HILT_GPU_REPEATS: how often, instead of `times`. HILT_GPU_EVERY: the first of so many cases.
void repeat_bit_for_bit(const std::vector<Case>& cases, Index times = scaled(26, 3)) {
  const Index each = asked_for("HILT_GPU_REPEATS", times), every = asked_for("HILT_GPU_EVERY", 1);
  Index judged = 0;
  for (std::size_t i = 0; i < cases.size(); i += static_cast<std::size_t>(every), ++judged) {
    SCOPED_TRACE(testing::Message() << cases[i]);
    repeats_bit_for_bit(cases[i], each);
  }
  std::cout << judged << " configurations, " << each << " repeats each" << std::endl;
}

TEST_F(OnGpuAttention, RepeatsBitForBit) { repeat_bit_for_bit(all_cases()); }

/// dQ has parts from several owners of keys, which are added up in an order that the set fixes.
std::vector<Case> added_up() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (const Index dim : {24, 40, 64, 96, 128}) {
    const auto add = [&](Case c) {
      c.dim = dim, c.batch = 7;
      for (const DType type : {DType::bf16, DType::f16}) c.type = type, out.push_back(c);
    };
    add({.pattern = "dense", .order = "row", .length = 640});
    add({.pattern = "dense", .order = "row", .length = 1500, .heads = 6, .kv_heads = 2, .causality = token});
    add({.pattern = "segment:512", .order = "row", .length = 1024, .packed = true});
    add({.pattern = "segment:384", .order = "row", .length = 1152, .heads = 4, .kv_heads = 1});
    add({.pattern = "slide:700", .order = "row", .length = 2100});
    if (dim <= 64) add({.pattern = "dense", .length = 1100, .heads = 3, .kv_heads = 3});
  }
  return out;
}

TEST_F(OnGpuAttention, AddsUpPartsOfSlopesInOnePass) {
  Worst worst;
  for (const Case& c : added_up()) {
    SCOPED_TRACE(testing::Message() << c);
    clear_attention_routes();
    agrees_with_the_plain_kernel(c, worst);
    EXPECT_TRUE(std::ranges::any_of(attention_routes(), [](const AttentionRoute& r) {
      return r.pass == "backward" && r.reason.starts_with("in one pass");
    }));
  }
  std::cout << "worst relative error: gradients " << worst.dx << std::endl;
}

// Whatever else is computed beside it.
TEST_F(OnGpuAttention, ASequenceHasTheSameBitsAloneAndAmongSeven) {
  std::vector<Case> cases = added_up();
  const std::vector<Case> few = of_few_owners();
  cases.insert(cases.end(), few.begin(), few.end());
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c);
    const PlanPtr plan = plan_of(c);
    const Inputs in = inputs_of(c);
    const Result all = play(in, plan);
    for (const Index row : {0, 4}) {
      const auto its = [&](const Tensor& x) { return x ? clone(slice(x, 0, row, row + 1)) : x; };
      const Result one = play({its(in.q), its(in.k), its(in.v), its(in.qkv), its(in.d_o)}, plan);
      ASSERT_EQ(bits(one.o), bits(its(all.o)));
      for (std::size_t i = 0; i < all.dx.size(); ++i)
        ASSERT_EQ(bits(one.dx[i]), bits(its(all.dx[i]))) << "gradient " << i;
    }
  }
}

TEST_F(OnGpuAttention, SumsOfOnePassRepeatBitForBit) { repeat_bit_for_bit(added_up()); }

// One segment full of NaN: its own rows are NaN, every other row keeps its bits.
TEST_F(OnGpuAttention, NotANumberStaysInItsGroup) {
  for (Index dim : {64, 128})
    for (Index w : {128, 256, 1024}) {
      const Case c{.pattern = "segment:" + std::to_string(w), .order = "row", .length = 4096, .dim = dim};
      SCOPED_TRACE(testing::Message() << c);
      const PlanPtr plan = plan_of(c);
      Inputs in = inputs_of(c);
      const Result clean = play(in, plan);
      for (Tensor* x : {&in.q, &in.k, &in.v, &in.d_o}) {
        *x = clone(*x);
        Tensor window = slice(*x, 1, w, 2 * w);
        copy(window, full(window.shape(), std::numeric_limits<double>::quiet_NaN(), DType::bf16, kGpu));
      }
      const Result got = play(in, plan);
      const auto judge = [&](const Tensor& now, const Tensor& before) {
        for (const auto& [from, till] : {std::pair<Index, Index>{0, w}, {2 * w, c.length}})
          EXPECT_EQ(bits(contiguous(slice(now, 1, from, till))), bits(contiguous(slice(before, 1, from, till))));
        for (const double v : slice(now, 1, w, 2 * w).to_vector()) ASSERT_TRUE(std::isnan(v));
      };
      judge(got.o, clean.o);
      for (std::size_t i = 0; i < 3; ++i) judge(got.dx[i], clean.dx[i]);
    }
}

// A row of NaN and one of infinity: every row that meets neither keeps its bits, and the others are
// what the plain kernel says.
void keeps_not_a_number_behind_masks(const Case& c) {
  const PlanPtr plan = plan_of(c);
  const Inputs clean = inputs_of(c);
  const Result before = play(clean, plan, c.dropout);
  for (int which = 0; which < 3; ++which) {  // keys and values, queries, the incoming gradient
    Inputs in = clean;
    const auto spoil = [&](Tensor& x) {
      const Index bad = std::min(x.dim(1) - 1, c.length / 2 + 5), worse = std::min(x.dim(1) - 1, bad + 1);
      x = clone(x);
      Tensor first = slice(x, 1, bad, bad + 1), second = slice(x, 1, worse, worse + 1);
      copy(first, full(first.shape(), std::numeric_limits<double>::quiet_NaN(), c.type, kGpu));
      copy(second, full(second.shape(), std::numeric_limits<double>::infinity(), c.type, kGpu));
    };
    if (which == 0) spoil(in.k), spoil(in.v);
    else spoil(which == 1 ? in.q : in.d_o);
    const Result got = play(in, plan, c.dropout), want = play(in_f32(in), plan, c.dropout);
    const auto judge = [&](const char* name, const Tensor& now, const Tensor& expected, const Tensor& old) {
      const std::vector<float> x = now.to_vector<float>(), y = expected.to_vector<float>(), z = old.to_vector<float>();
      for (std::size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(std::isnan(x[i]), std::isnan(y[i]))
            << name << ' ' << i << ": " << x[i] << ", plain " << y[i] << "; spoiled " << which;
        if (!std::isfinite(y[i])) continue;
        ASSERT_LT(std::abs(x[i] - y[i]), 0.02f * std::abs(y[i]) + 0.1f) << name << ' ' << i << ", before " << z[i];
      }
    };
    judge("o", got.o, want.o, before.o);
    for (std::size_t i = 0; i < 3; ++i) judge("gradient", got.dx[i], want.dx[i], before.dx[i]);
  }
}

TEST_F(OnGpuAttention, NotANumberDoesNotPassMasks) {
  for (const Case& c : all_cases()) {
    if (c.packed || c.length > 4096) continue;
    SCOPED_TRACE(testing::Message() << c);
    keeps_not_a_number_behind_masks(c);
  }
}

// ---- the tensor cores of any GPU: f16, grouped heads, every head dim, tiles of any size ---------

class OnGpuTensorCores : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
    if (cuda::properties(0).major < 8) GTEST_SKIP() << "older than sm_80";
  }
};

std::vector<Case> on_tensor_cores() {
  std::vector<Case> out;
  constexpr Causality token = Causality::token;
  for (const DType type : {DType::f16, DType::bf16})
    for (const Index dim : {16, 32, 48, 64, 80, 96, 112, 128}) {
      const auto add = [&](Case c) {
        c.dim = dim, c.type = type;
        out.push_back(c);
      };
      add({.pattern = "dense", .order = "row", .length = 256});
      add({.pattern = "dense",
           .order = "row",
           .batch = 2,
           .length = 1000,
           .heads = 4,
           .kv_heads = 2,
           .causality = token});
      add({.pattern = "dense", .length = 300, .heads = 6, .kv_heads = 1, .causality = token, .dropout = 0.25});
      add({.pattern = "segment:100", .batch = 2, .length = 1037, .heads = 3, .kv_heads = 1});
      add({.pattern = "segment:7", .length = 200, .causality = token});
      add({.pattern = "segment:512,dilation=4,offset=1", .length = 1024, .mode = DilationMode::longnet});
      add({.pattern = "segment:64+segment:256,dilation=3",
           .length = 777,
           .heads = 4,
           .kv_heads = 2,
           .mode = DilationMode::longnet,
           .causality = token});
      add({.pattern = "segment:1024,dilation=8,offset=head",
           .length = 1024,
           .heads = 4,
           .kv_heads = 2,
           .dropout = 0.1});
      add({.pattern = "neighborhood2d:7x5", .batch = 2, .length = 1024, .heads = 4, .kv_heads = 4, .packed = true});
      add({.pattern = "slide2d:8x3",
           .order = "hilbert:25x44",
           .length = 1100,
           .heads = 2,
           .kv_heads = 1,
           .causality = token});
      add({.pattern = "slide:100", .order = "row", .length = 700, .dropout = 0.5});
      add({.pattern = "neighborhood:301", .length = 999, .causality = Causality::curve});
      add({.pattern = "slide:60|blocks:64@global_local:1:1", .order = "row", .batch = 2, .length = 700});
      add({.pattern = "neighborhood3d:3x5x5", .order = "hilbert:8x12x6", .length = 576, .heads = 4, .kv_heads = 2});
      add({.pattern = "slide:50", .length = 700, .kv_heads = 1, .dropout = 0.2, .documents = "300,1,60,60,60,200"});
      add({.pattern = "segment:64", .batch = 2, .length = 700, .causality = token, .documents = "100,16x24,100/1,690"});
    }
  return out;
}

TEST_F(OnGpuTensorCores, AgreeWithThePlainKernel) {
  const Setting forced("HILT_ROUTE", "mma");
  Worst worst;
  for (const Case& c : on_tensor_cores()) {
    SCOPED_TRACE(testing::Message() << c);
    agrees_with_the_plain_kernel(c, worst);
  }
  std::cout << "worst relative error, that of f16 times 8: o " << worst.o << ", gradients " << worst.dx
            << "; lse absolute " << worst.lse << std::endl;
}

// What HILT_ROUTE leaves them, they serve, and say so.
TEST_F(OnGpuTensorCores, Serve) {
  const Setting forced("HILT_ROUTE", "mma");
  for (const Case& c : on_tensor_cores()) {
    SCOPED_TRACE(testing::Message() << c);
    clear_attention_routes();
    play(inputs_of(c), plan_of(c), c.dropout);
    for (const AttentionRoute& r : attention_routes()) EXPECT_EQ(r.route, "mma") << r.pass << ": " << r.reason;
  }
}

TEST_F(OnGpuAttention, RoutesAreForcedWhereTheyServe) {
  const Case c{.pattern = "segment:128", .length = 512, .dim = 64};
  const Inputs in = inputs_of(c);
  const auto routes = [&](const char* name) {
    const Setting forced("HILT_ROUTE", name);
    clear_attention_routes();
    play(in, plan_of(c));
    std::set<std::string> out;
    for (const AttentionRoute& r : attention_routes()) out.emplace(r.route);
    return out;
  };
  EXPECT_EQ(routes("plain"), std::set<std::string>{"plain"});
  EXPECT_EQ(routes("mma"), std::set<std::string>{"mma"});
  EXPECT_THROW(routes("fast"), Error);
}

TEST_F(OnGpuTensorCores, RepeatBitForBit) {
  const Setting forced("HILT_ROUTE", "mma");
  repeat_bit_for_bit(on_tensor_cores(), scaled(11, 2));
}

TEST_F(OnGpuTensorCores, KeepNotANumberBehindMasks) {
  const Setting forced("HILT_ROUTE", "mma");
  for (const Case& c : on_tensor_cores()) {
    if (c.packed) continue;
    SCOPED_TRACE(testing::Message() << c);
    keeps_not_a_number_behind_masks(c);
  }
}

// dS beyond what f16 holds, though no input or result is: the plain kernel does those tiles.
void slopes_too_large_for_f16(const char* pattern) {
  const Case c{
      .pattern = pattern, .order = "row", .length = 1000, .heads = 4, .kv_heads = 4, .dim = 64, .type = DType::f16};
  const PlanPtr plan = plan_of(c);
  Inputs in = inputs_of(c);
  in.q = mul(in.q, 0.25), in.k = mul(in.k, 0x1p-6), in.v = mul(in.v, 2), in.d_o = mul(in.d_o, 6000);
  const Result want = play(in_f32(in), plan), got = play(in, plan);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_LT(relative(got.dx[i], want.dx[i]), 1e-3) << "gradient " << i;
}
TEST_F(OnGpuTensorCores, SlopesTooLargeForF16) {
  const Setting forced("HILT_ROUTE", "mma");
  slopes_too_large_for_f16("segment:2");
}
TEST_F(OnGpuAttention, SlopesTooLargeForF16) {
  for (const char* pattern : {"segment:2", "slide:1"}) slopes_too_large_for_f16(pattern);
}

// ---- parts of one attention: an online softmax that goes on in f32, gradients that are added to -

struct Parts {
  std::string name;
  PlanPtr plan;
  Index batch, kv_heads, dim;
};

/// What ranks and plans of several branches are made of.
std::vector<Parts> parts() {
  std::vector<Parts> out;
  for (Index dim : {64, 128, 192}) {
    const auto add = [&](Case c) {
      c.dim = dim;
      std::ostringstream name;
      name << c;
      out.push_back({name.str(), plan_of(c), c.batch, c.kv_heads, dim});
    };
    constexpr Causality token = Causality::token;
    add({.pattern = "dense", .order = "row", .batch = 2, .length = 1024});
    add({.pattern = "dense", .order = "row", .length = 1280});
    add({.pattern = "dense", .order = "row", .length = 1152, .causality = token});
    add({.pattern = "dense", .order = "hilbert", .batch = 2, .length = 1024, .causality = token});
    add({.pattern = "segment:128", .length = 512});
    add({.pattern = "segment:256", .length = 1024, .causality = token});
    add({.pattern = "segment:128+segment:512,dilation=2", .length = 1024, .mode = DilationMode::longnet});
    add({.pattern = "segment:256+segment:1024,dilation=4", .length = 1024, .causality = token});
    add({.pattern = "segment:100+segment:400,dilation=3",
         .length = 900,
         .heads = 4,
         .kv_heads = 2,
         .mode = DilationMode::head_groups});
    add({.pattern = "segment:512,dilation=2,offset=head",
         .length = 1024,
         .heads = 3,
         .kv_heads = 3,
         .causality = token});
    add({.pattern = "segment:2048,dilation=64", .batch = 2, .length = 2048});
    add({.pattern = "segment:1024,dilation=32", .length = 2048, .heads = 4, .causality = token});
    PlanSpec spec;  // 64 queries have all keys, 64 two blocks of them, the others none
    spec.length = 2048, spec.heads = 2, spec.order = parse_order("row", 2048);
    BlockPairs pairs{{2, 1}, {2, 7}};
    for (Index i = 0; i < 32; ++i) pairs.emplace_back(0, i);
    spec.pattern = {blocks(64, pairs)};
    out.push_back({"few blocks D " + std::to_string(dim), make_plan(spec), 2, 2, dim});
    // the second and the last block of queries attend to nothing
    spec.length = 1024,
    spec.pattern = {blocks(128, {{0, 0}, {0, 5}, {2, 1}, {2, 2}, {2, 3}, {3, 7}, {4, 0}, {5, 5}, {6, 1}, {6, 6}})};
    spec.order = parse_order("row", 1024);
    out.push_back({"blocks D " + std::to_string(dim), make_plan(spec), 2, 2, dim});
    spec.length = 1000, spec.order = parse_order("row", 1000);
    out.push_back({"blocks of a part D " + std::to_string(dim), make_plan(spec), 2, 2, dim});
    spec.causality = token;
    out.push_back({"causal blocks D " + std::to_string(dim), make_plan(spec), 1, 2, dim});
  }
  return out;
}

Inputs inputs_of(const Parts& p) {
  return inputs_of(Case{.pattern = "",
                        .batch = p.batch,
                        .length = p.plan->length(),
                        .heads = p.plan->heads(),
                        .kv_heads = p.kv_heads,
                        .dim = p.dim});
}

Result ones_to_start(const Inputs& in) {
  const auto like = [](const Tensor& x) { return ones(x.shape(), DType::f32, kGpu); };
  return {{}, {}, {like(in.q), like(in.k), like(in.v)}};
}

/// Through the kernels that go on, twice where asked: o and gradients in f32, gradients added to
/// those of `start`.
Result in_parts(const Inputs& in, const PlanPtr& plan, bool fresh, int times = 1, const Result* start = nullptr) {
  const Call call = checked_call("parts", plan, {}, plan->length(), plan->length(), in.q, in.k, in.v);
  const double none = fresh ? std::numeric_limits<double>::quiet_NaN() : 0;  // what must not be read
  SoftmaxState state{full(in.q.shape(), none, DType::f32, kGpu),
                     full({call.batch, call.heads(), call.queries},
                          fresh ? none : -std::numeric_limits<double>::infinity(), DType::f32, kGpu),
                     fresh};
  for (int i = 0; i < times; ++i) attend(call, plan->parts(), in.q, in.k, in.v, state);
  const auto blank = [&](std::size_t i, const Tensor& like) {
    return start ? clone(start->dx[i]) : zeros(like.shape(), DType::f32, kGpu);
  };
  std::array<Tensor, 3> d{blank(0, in.q), blank(1, in.k), blank(2, in.v)};
  const Tensor delta = sum(mul(state.o, to(in.d_o, DType::f32)), {-1});
  BackwardInputs x{in.q, in.k, in.v, state.o, in.d_o, state.lse};
  x.delta = contiguous(permute(delta, {0, 2, 1}));
  TermTensors no_terms;
  ShardPlan::Stage stage;
  stage.parts = plan->parts();
  for (int i = 0; i < times; ++i) run_backward(call, decide_backward(call, x, &stage), x, d, no_terms);
  return {state.o, state.lse, {d[0], d[1], d[2]}};
}

/// The largest difference over the largest value.
double distance(const Tensor& got, const Tensor& want) {
  const std::vector<double> x = got.to_vector(), y = want.to_vector();
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;  // -inf where a row has no key
    if (!(std::abs(x[i] - y[i]) <= worst)) worst = std::abs(x[i] - y[i]);
    largest = std::max(largest, std::abs(y[i]));
  }
  return largest > 0 ? worst / largest : worst;
}

TEST_F(OnGpuAttention, GoesOnInF32AsTheFormulasSay) {
  double worst = 0;
  for (const Parts& p : parts()) {
    SCOPED_TRACE(p.name);
    const Inputs in = inputs_of(p);
    // The definition in f64, and the naive formula in bf16, one op at a time, on the CPU.
    const auto here = [&](const Tensor& x, DType type) { return to(moved(x, {}), type); };
    const auto on_cpu = [&](DType type, Backward mode) {
      const Tensor q = here(in.q, type), k = here(in.k, type), v = here(in.v, type);
      Tape tape;
      for (const Tensor* t : {&q, &k, &v}) tape.watch(*t);
      Result r;
      r.o = attention(q, k, v, p.plan, {.backward = mode});
      r.lse = attention_with_lse(q, k, v, p.plan).lse;
      const Gradients g = tape.backward(r.o, here(in.d_o, type));
      r.dx = {g[q], g[k], g[v]};
      return r;
    };
    const Result want = on_cpu(DType::f64, Backward::fused), naive = on_cpu(DType::bf16, Backward::taped);
    bool covers = branch_count(*p.plan) == 1;
    for (const Tiling& t : p.plan->tilings())
      covers = covers && static_cast<Index>(t.q_token.size()) == p.plan->length();
    for (const bool fresh : {false, true}) {
      if (fresh && !covers) continue;
      const Result got = in_parts(in, p.plan, fresh);
      const auto judge = [&](const char* name, const Tensor& x, const Tensor& y, const Tensor& z) {
        const double off = distance(x, z), allowed = 2 * distance(y, z) + 0x1p-9;
        EXPECT_LE(off, allowed) << name << (fresh ? ", fresh" : "");
        worst = std::max(worst, off / allowed);
      };
      judge("o", got.o, naive.o, want.o);
      EXPECT_LT(distance(got.lse, want.lse), 1e-5);
      for (std::size_t i = 0; i < 3; ++i)
        judge(i == 0 ? "dq" : i == 1 ? "dk" : "dv", got.dx[i], naive.dx[i], want.dx[i]);
    }
    // The same keys once more: as many of everything, so O stays and L grows by log 2; and
    // gradients are added to what is there.
    const Result once = in_parts(in, p.plan, false), start = ones_to_start(in);
    const Result twice = in_parts(in, p.plan, covers, 2, &start);
    EXPECT_LT(distance(twice.o, once.o), 1e-5);
    EXPECT_LT(distance(twice.lse, add(once.lse, std::log(2.0))), 1e-6);
    // Each half of the weights, twice: the gradients of once, beside the ones.
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LT(distance(sub(twice.dx[i], start.dx[i]), once.dx[i]), 5e-3) << i;
  }
  std::cout << "worst error over twice the naive one's and half a unit: " << worst << std::endl;
}

TEST_F(OnGpuAttention, DocumentsOfRowsOfTheirOwn) {
  Case c{.pattern = "dense", .batch = 2, .length = 1000, .kv_heads = 1};
  c.type = DType::f32, c.causality = Causality::token;
  const Inputs in = inputs_of(c);
  PlanSpec spec = plan_of(c)->spec();
  spec.documents = parse_documents("300,16x24,300/1,900");
  const PlanPtr plan = make_plan(spec);
  const auto all = [&](Device device, Backward mode) {
    const Tensor q = moved(in.q, device), k = moved(in.k, device), v = moved(in.v, device);
    Tape tape;
    for (const Tensor* t : {&q, &k, &v}) tape.watch(*t);
    const Tensor o = attention(q, k, v, plan, {.backward = mode});
    const Gradients g = tape.backward(o, moved(in.d_o, device));
    return std::array{moved(o, {}), moved(g[q], {}), moved(g[k], {}), moved(g[v], {})};
  };
  const auto want = all({}, Backward::fused);
  for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
    const auto got = all(kGpu, mode);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_LT(distance(got[i], want[i]), 1e-5) << name_of(mode) << ' ' << i;
  }
}

TEST_F(OnGpuAttention, PartsRepeatBitForBit) {
  for (const Parts& p : parts()) {
    SCOPED_TRACE(p.name);
    const Inputs in = inputs_of(p);
    const Result first = in_parts(in, p.plan, false, 2);
    for (int i = 0; i < scaled(25, 3); ++i) {
      const Result again = in_parts(in, p.plan, false, 2);
      ASSERT_EQ(bits(again.o), bits(first.o)) << i;
      ASSERT_EQ(bits(again.lse), bits(first.lse)) << i;
      for (std::size_t k = 0; k < 3; ++k) ASSERT_EQ(bits(again.dx[k]), bits(first.dx[k])) << i << ", gradient " << k;
    }
  }
}

// A value that is not finite behind a mask: the tile goes to the plain kernel, and is added once.
TEST_F(OnGpuAttention, PartsKeepNotANumberBehindMasks) {
  for (const Parts& p : parts()) {
    SCOPED_TRACE(p.name);
    const Inputs clean = inputs_of(p);
    for (int which = 0; which < 3; ++which) {  // keys and values, queries, the incoming gradient
      Inputs in = clean;
      const auto spoil = [&](Tensor& x) {
        x = clone(x);
        const Index bad = p.plan->length() / 2 + 5;
        for (const auto& [row, value] : {std::pair{bad, std::numeric_limits<double>::quiet_NaN()},
                                         {bad + 1, std::numeric_limits<double>::infinity()}}) {
          Tensor line = slice(x, 1, row, row + 1);
          copy(line, full(line.shape(), value, DType::bf16, kGpu));
        }
      };
      if (which == 0) spoil(in.k), spoil(in.v);
      else spoil(which == 1 ? in.q : in.d_o);
      const Result start = ones_to_start(in);
      const Result got = in_parts(in, p.plan, false, 2, &start), want = in_parts(in_f32(in), p.plan, false, 2, &start);
      const auto judge = [&](const char* name, const Tensor& now, const Tensor& expected) {
        const std::vector<float> x = now.to_vector<float>(), y = expected.to_vector<float>();
        for (std::size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(std::isnan(x[i]), std::isnan(y[i]))
              << name << ' ' << i << ": " << x[i] << ", plain " << y[i] << "; spoiled " << which;
          if (!std::isfinite(y[i])) continue;
          ASSERT_LT(std::abs(x[i] - y[i]), 0.02f * std::abs(y[i]) + 0.1f * std::sqrt(static_cast<float>(p.dim) / 64))
              << name << ' ' << i << "; spoiled " << which;
        }
      };
      judge("o", got.o, want.o);
      judge("lse", got.lse, want.lse);
      for (std::size_t i = 0; i < 3; ++i) judge("gradient", got.dx[i], want.dx[i]);
    }
  }
}

TEST_F(OnGpuAttention, PartsAreServed) {
  for (const Parts& p : parts()) {
    SCOPED_TRACE(p.name);
    const Inputs in = inputs_of(p);
    clear_attention_routes();
    in_parts(in, p.plan, false);
    for (const AttentionRoute& r : attention_routes()) EXPECT_EQ(r.route, "hopper") << r.pass << ": " << r.reason;
  }
}

// At the peak of both directions a call holds no more than attention_memory() says, and not far
// less: of routes that write 16 bits at once it counts sums of 32.
TEST_F(OnGpuAttention, HoldsWhatIsStated) {
  for (const Case& c :
       {Case{"dense", "row", 1, 16384, 8, 2, 64, false, DilationMode::all_queries, Causality::none, DType::bf16, 0, "",
             128},
        Case{"dense", "row", 1, 1024, 8, 2, 128}, Case{"segment:512", "row", 2, 8192, 8, 8, 64},
        Case{"dense", "row", 2, 4096, 8, 8, 128, false, DilationMode::all_queries, Causality::token},
        Case{"segment:1024", "given", 2, 8192, 4, 4, 64},
        Case{"dense", "given", 1, 32768, 1, 1, 64, false, DilationMode::all_queries, Causality::token},
        Case{"segment:1024", "given", 2, 8192, 4, 4, 64, false, DilationMode::all_queries, Causality::token}}) {
    const PlanPtr plan = plan_of(c);
    const Inputs in = inputs_of(c);
    AttentionOptions options;
    std::vector<std::int32_t> pi = query_run(0, c.length);
    std::ranges::reverse(pi);
    if (plan->takes_order()) options.permutation = moved(from_values(pi, {c.length}), kGpu);
    const auto run = [&] {
      Tape tape;
      for (const Tensor* t : {&in.q, &in.k, &in.v}) tape.watch(*t);
      const Gradients g = tape.backward(attention(in.q, in.k, in.v, plan, options), in.d_o);
      return g.size();
    };
    run();  // what stays with the plan is there
    synchronize(kGpu);
    const auto before = static_cast<double>(memory_stats(kGpu).live);
    reset_memory_peak(kGpu);
    run();
    const double held = static_cast<double>(memory_stats(kGpu).peak) - before;
    const auto stated = static_cast<double>(
        attention_memory(*plan, c.batch, c.kv_heads, c.dim, c.type, Backward::fused, {}, kGpu).peak);
    EXPECT_LE(held, 1.05 * stated) << c;
    EXPECT_GE(held, 0.4 * stated) << c;
    std::cout << c << ": " << held / stated << " of what is stated" << std::endl;
  }
}

// An order that comes with the call: the bits of the plan made with it, no wait, and a wrong one is
// named by the next value that is asked for.
TEST_F(OnGpuAttention, OrdersComeWithTheCall) {
  PlanSpec spec{.length = 512, .heads = 2, .order = parse_order("given", 512), .pattern = parse_pattern("segment:128")};
  spec.documents = {DocumentList{256, 200}};
  const PlanPtr any = make_plan(spec);
  const auto reversed = [](Index begin, Index end, std::vector<std::int32_t>& pi) {
    for (Index i = end; i-- > begin;) pi.push_back(static_cast<std::int32_t>(i));
  };
  std::vector<std::int32_t> one, two = query_run(0, 512);
  for (const auto& [begin, end] : {std::pair(0, 256), {256, 456}, {456, 512}}) reversed(begin, end, one);
  const auto x = [](std::uint64_t stream) { return randn({2, 512, 2, 64}, {5, stream}, DType::bf16, kGpu); };
  const Tensor q = x(1), k = x(2), v = x(3);
  AttentionOptions options;
  const auto bring = [&](const std::vector<std::int32_t>& first, const std::vector<std::int32_t>& second) {
    options.permutation = moved(stack({from_values(first, {512}), from_values(second, {512})}), kGpu);
  };
  bring(one, two);
  (void)attention(q, k, v, any, options).to_vector();
  const auto waits = device_counters(kGpu).host_waits;
  const Tensor o = attention(q, k, v, any, options);
  EXPECT_EQ(device_counters(kGpu).host_waits, waits);
  for (Index row = 0; row < 2; ++row) {
    spec.given = row == 0 ? one : two;
    const auto own = [&](const Tensor& y) { return slice(y, 0, row, row + 1); };
    EXPECT_EQ(own(o).to_vector(), attention(own(q), own(k), own(v), make_plan(spec)).to_vector()) << row;
  }
  std::swap(two[255], two[256]);
  bring(one, two);
  (void)attention(q, k, v, any, options);
  const std::string wrong = error_of([] { synchronize(kGpu); });
  EXPECT_TRUE(wrong.starts_with("data: permutation: no bijection inside each document: row 1, token ")) << wrong;
  EXPECT_EQ(error_of([] { synchronize(kGpu); }), "nothing");
}

/// A pseudorandom order inside each of these, [begin, end).
std::vector<std::int32_t> shuffled(const std::vector<Index>& cut, std::uint64_t seed) {
  std::vector<std::int32_t> pi;
  for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
    const std::vector<std::int32_t> its = query_run(cut[i], cut[i + 1] - cut[i]);
    pi.insert(pi.end(), its.begin(), its.end());
    for (Index n = cut[i + 1] - cut[i]; n > 1; --n) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      std::swap(pi[pi.size() - static_cast<std::size_t>(n)],
                pi[pi.size() - 1 - static_cast<std::size_t>((seed >> 33) % static_cast<std::uint64_t>(n))]);
    }
  }
  return pi;
}
/// O, L and the gradients of what is watched: q, k, v and score terms.
std::vector<Tensor> results_of(const std::array<Tensor, 4>& in, const PlanPtr& plan, const AttentionOptions& how) {
  std::vector<Tensor> watched(in.begin(), in.begin() + 3), out;
  for (const Tensor& x : term_inputs(how.terms))
    if (x) watched.push_back(x);
  Tape tape;
  for (const Tensor& x : watched) tape.watch(x);
  const AttentionResult r = attention_with_lse(in[0], in[1], in[2], plan, how);
  const Gradients g = tape.backward(r.o, in[3]);
  out = {r.o, r.lse};
  for (const Tensor& x : watched) out.push_back(g[x]);
  return out;
}

constexpr Index kFollowed = 1000, kFollowedHeads = 2;
/// A call that looks at tokens; each: rows of the batch have an order each.
struct Followed {
  std::string_view what;
  const char* pattern;
  DType type;
  bool documents, each;

  bool asks(std::string_view name) const { return what == name || what == "all"; }
  PlanSpec spec() const {
    PlanSpec s{.length = kFollowed, .heads = kFollowedHeads, .order = parse_order("given", kFollowed)};
    s.pattern = parse_pattern(pattern);
    if (asks("causal")) s.causality = Causality::token;
    if (what == "curve") s.causality = Causality::curve;
    if (documents) s.documents = {DocumentList{400, 350}};
    return s;
  }
  AttentionOptions options() const {
    const auto x = [](const Shape& s, std::uint64_t stream) { return randn(s, {9, stream}, DType::f32, kGpu); };
    AttentionOptions how;
    if (asks("alibi") || what == "curve") how.terms.slopes = alibi_slopes(kFollowedHeads, DType::f32, kGpu);
    if (asks("relative")) how.terms.relative = x({kFollowedHeads, 101}, 5);
    if (asks("bias")) how.terms.bias = x({2, 1, kFollowed, kFollowed}, 6);
    if (what == "bias of keys") how.terms.bias = x({2, kFollowedHeads, 1, kFollowed}, 6);
    if (asks("dropout")) how.dropout = 0.2, how.key = RandomKey{3, 4};
    return how;
  }
  std::vector<std::int32_t> order(std::uint64_t seed) const {
    return documents ? shuffled({0, 400, 750, kFollowed}, seed) : shuffled({0, kFollowed}, seed);
  }
  Tensor permutation(std::uint64_t first, std::uint64_t second) const {
    const Tensor one = from_values(order(first), {kFollowed});
    return moved(each ? stack({one, from_values(order(second), {kFollowed})}) : one, kGpu);
  }
};
/// Each row of the batch by a plan with its order: those of the batch.
std::vector<Tensor> by_plans(const Followed& c, const std::array<Tensor, 4>& in) {
  std::vector<Tensor> out;
  for (Index row = 0; row < 2; ++row) {
    const auto own = [&](const Tensor& x) { return contiguous(slice(x, 0, row, row + 1)); };
    PlanSpec spec = c.spec();
    spec.given = c.order(row == 0 || !c.each ? 1 : 2);
    AttentionOptions how = c.options();
    how.first_batch = row;
    if (how.terms.bias) how.terms.bias = own(how.terms.bias);
    const std::vector<Tensor> its = results_of({own(in[0]), own(in[1]), own(in[2]), own(in[3])}, make_plan(spec), how);
    for (std::size_t i = 0; i < its.size(); ++i) {
      const bool of_row = i < 5 || (how.terms.bias && i + 1 == its.size());  // what tables and slopes get adds up
      if (row == 0) out.push_back(its[i]);
      else out[i] = of_row ? cat({out[i], its[i]}, 0) : add(out[i], its[i]);
    }
  }
  return out;
}
void expect_followed(const Followed& c) {
  SCOPED_TRACE(testing::Message() << c.type << ' ' << c.pattern << ' ' << c.what << ", documents " << c.documents
                                  << ", an order each " << c.each);
  const auto x = [&](std::uint64_t stream) {
    return randn({2, kFollowed, kFollowedHeads, 64}, {5, stream}, c.type, kGpu);
  };
  const std::array in{x(1), x(2), x(3), x(4)};
  const PlanPtr any = make_plan(c.spec());
  AttentionOptions given = c.options();
  given.permutation = c.permutation(7, 8);
  (void)results_of(in, any, given);
  given.permutation = c.permutation(1, 2);
  synchronize(kGpu);
  const auto waits = device_counters(kGpu).host_waits;
  const std::vector<Tensor> got = results_of(in, any, given);
  EXPECT_EQ(device_counters(kGpu).host_waits, waits);
  const std::vector<Tensor> want = by_plans(c, in);
  ASSERT_EQ(got.size(), want.size());
  const auto finite = [](const Tensor& of) {  // an L may be -inf; NaN stays
    const Tensor y = to(of, DType::f32);
    return where(greater(scalar_like(y, -1e30), y), scalar_like(y, 0), y);
  };
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LT(relative(finite(got[i]), finite(want[i])), c.type == DType::f32 ? 1e-5 : 1e-2) << "result " << i;
}

// Where something looks at tokens, kernels follow an order that comes with the call: no wait and no
// plan, and what the plan made with that order gives.
TEST_F(OnGpuAttention, OrdersThatKernelsFollowComeWithTheCall) {
  for (const char* pattern : {"dense", "segment:64", "segment:96,dilation=3", "slide:70", "segment:128+slide:9"})
    for (const char* what : {"causal", "alibi", "relative", "bias", "bias of keys", "dropout", "curve", "all"})
      for (const bool each : {false, true}) {
        for (const bool documents : {false, true})
          for (const DType type : {DType::f32, DType::bf16}) expect_followed({what, pattern, type, documents, each});
        const Setting forced("HILT_ROUTE", "mma");
        expect_followed({what, pattern, DType::f16, false, each});
      }
}

// ---- which route serves what --------------------------------------------------------------------

/// A kind of call; terms: score terms' tensors, wanted: whether their gradients are.
struct Kind {
  const char* name;
  Case c{};
  ScoreTerms terms{};
  bool wanted = false, unaligned = false;
};
std::vector<Kind> kinds() {
  constexpr Causality token = Causality::token;
  const auto dense = [](Index dim) { return Case{.pattern = "dense", .order = "row", .length = 1024, .dim = dim}; };
  const auto f32 = [](const Shape& s) { return randn(s, {7, 1}, DType::f32, kGpu); };
  Case plain = dense(64), causal = plain, dropped = plain, few = plain;
  plain.type = DType::f32, causal.causality = token, dropped.dropout = 0.1, few.queries = 100;
  std::vector<Kind> out{{"f32", plain}, {"bf16, dense", dense(64)}, {"causal", causal}};
  const auto add = [&](const char* name, Case c) { out.push_back({name, std::move(c)}); };
  add("segments of 128", {.pattern = "segment:128"});
  add("segments of 2048", {.pattern = "segment:2048"});
  add("neighborhoods of 17 x 17", {.pattern = "neighborhood2d:17x17"});
  add("in 3-D, of 3 x 5 x 5", {.pattern = "neighborhood3d:3x5x5", .order = "hilbert:8x12x12", .length = 1152});
  add("documents", {.pattern = "dense", .order = "row", .length = 1500, .documents = "700,60,400"});
  add("a union", {.pattern = "slide:60|blocks:64@global_local:1:1", .order = "row", .length = 1000});
  add("a prefix of 4", {.pattern = "neighborhood2d:7x7,prefix=4", .order = "hilbert:32x32", .length = 1028});
  add("a given order", {.pattern = "segment:128", .order = "given", .length = 1024});
  add("the last 100 queries", few), add("dropout", dropped);
  for (const bool wanted : {false, true}) {
    const auto with = [&](const char* name, ScoreTerms terms) { out.push_back({name, causal, terms, wanted}); };
    with(wanted ? "slopes, with gradients" : "slopes", {.alibi = !wanted, .slopes = wanted ? f32({2}) : Tensor{}});
    with(wanted ? "relative, with gradients" : "relative", {.relative = f32({2, 101})});
    with(wanted ? "bias, with gradients" : "bias", {.bias = f32({1024, 1024})});
    with(wanted ? "sink, with gradients" : "sink", {.sink = f32({2})});
  }
  out.push_back({"a softcap of 30", causal, {.softcap = 30}});
  add("head dim 40", dense(40)), add("head dim 100", dense(100)), add("head dim 160", dense(160));
  add("head dim 256", dense(256));
  out.push_back({.name = "rows of 65 numbers, read in part", .c = dense(64), .unaligned = true});
  return out;
}
/// `pass route: reason` of each pass of a call, as JSON.
std::string routes_of(const Kind& kind, const char* forced) {
  const Setting setting("HILT_ROUTE", forced);
  const Case& c = kind.c;
  PlanSpec spec{.length = c.length, .heads = c.heads};
  spec.pattern = parse_pattern(c.pattern), spec.causality = c.causality;
  spec.order = parse_order(c.order, behind_prefix(spec.pattern, c.length));
  if (c.order == "given") spec.given = query_run(0, c.length);
  if (!c.documents.empty()) spec.documents = parse_documents(c.documents);
  if (c.queries > 0) spec.queries = query_run(c.length - c.queries, c.queries);
  Inputs in = inputs_of(c);
  if (kind.unaligned) in.k = slice(randn({1, c.length, c.kv_heads, 65}, {11, 2}, c.type, kGpu), 3, 0, 64);
  AttentionOptions how{.dropout = c.dropout, .strict = true, .terms = kind.terms};
  if (c.dropout > 0) how.key = RandomKey{3, 4};
  Tape tape;
  for (const Tensor* t : {&in.q, &in.k, &in.v}) tape.watch(*t);
  for (const Tensor* t : {&how.terms.slopes, &how.terms.relative, &how.terms.bias, &how.terms.sink})
    if (kind.wanted && *t) tape.watch(*t);
  clear_attention_routes();
  tape.backward(attention(in.q, in.k, in.v, make_plan(spec), how), in.d_o);
  std::set<std::string> seen;
  std::string out;
  for (const AttentionRoute& r : attention_routes()) {
    const std::string said =
        "[\"" + std::string(r.pass) + "\", \"" + std::string(r.route) + "\", \"" + std::string(r.reason) + "\"]";
    if (seen.insert(said).second) out += (out.empty() ? "" : ", ") + said;
  }
  return out;
}

// The table in ops/hilbert/kernels/README.md; HILT_ROUTES_TO names a file to write it to instead.
TEST_F(OnGpuAttention, RoutesAreThoseOfTheTable) {
  std::ostringstream lines;
  for (const Kind& kind : kinds())
    lines << "{\"call\": \"" << kind.name << "\", \"hopper\": [" << routes_of(kind, "") << "], \"other\": ["
          << routes_of(kind, "mma") << "]}\n";
  if (const char* to = std::getenv("HILT_ROUTES_TO")) {
    ASSERT_TRUE(std::ofstream(to) << lines.str()) << to;
    return;
  }
  const char* const source = std::getenv("SRC");
  std::ifstream file(std::string(source ? source : ".") + "/tests/bench/results/routes.jsonl");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), lines.str());
}

// Head dims that the others do not draw, against the CPU.
TEST_F(OnGpuAttention, LargeHeadDims) {
  for (Index dim : {129, 160, 192, 255, 256})
    for (DType type : {DType::f32, DType::bf16}) {
      const Case c{.pattern = "slide:20+segment:64,dilation=3", .length = 200, .heads = 2, .kv_heads = 1, .dim = dim};
      SCOPED_TRACE(testing::Message() << c << ' ' << type);
      const PlanPtr plan = plan_of(c);
      const Shape wide{1, c.length, 2, dim}, narrow{1, c.length, 1, dim};
      const auto x = [&](const Shape& s, std::uint64_t stream) { return randn(s, {5, stream}, type); };
      const Inputs here{x(wide, 1), x(narrow, 2), x(narrow, 3), {}, x(wide, 4)};
      const Inputs there{moved(here.q, kGpu), moved(here.k, kGpu), moved(here.v, kGpu), {}, moved(here.d_o, kGpu)};
      const Result want = play(in_f32(here), plan), got = play(there, plan);
      const double allowed = type == DType::f32 ? 2e-6 : 4e-3;
      EXPECT_LT(relative(moved(got.o, {}), want.o), allowed);
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_LT(relative(moved(got.dx[i], {}), want.dx[i]), allowed) << "gradient " << i;
    }
  const Tensor q = zeros({1, 8, 1, 257}, DType::f32, kGpu);
  EXPECT_THROW(attention(q, q, q, plan_of({.pattern = "dense", .length = 8, .heads = 1, .kv_heads = 1})), Error);
}

}  // namespace
}  // namespace hilt
