// Tokens that come one after the other, with the keys and values of those before them kept, have
// the logits of one pass over all, and cost what their plans list.

#include <gtest/gtest.h>

#include <numeric>

#include "core/tape.h"
#include "nn/transformer.h"
#include "ops/ops.h"
#include "tests/nn/modules.h"

using namespace hilt;

namespace {

TransformerConfig small(const std::string& order, const std::string& pattern) {
  TransformerConfig c;
  c.layers = 2, c.heads = 2, c.width = 12, c.context = 64, c.vocab = 11;
  c.order = parse_order(order, c.context);
  c.pattern = parse_pattern(pattern);
  return c;
}

Tensor some_ids(Index batch, Index length) {
  Tensor ids = zeros({batch, length}, DType::i32);
  for (Index i = 0; i < batch * length; ++i)
    ids.mutable_data<std::int32_t>()[i] = static_cast<std::int32_t>((i * 7 + i / 5 * 3) % 11);
  return ids;
}

/// The logits of ids[:, begin..end), passed in these pieces.
Tensor by_pieces(const Transformer& m, KeyValueCache& cache, const Tensor& ids, const std::vector<Index>& pieces) {
  std::vector<Tensor> logits;
  Index at = 0;
  for (const Index n : pieces) logits.push_back(m.logits(slice(ids, 1, at, at + n), {.cache = &cache})), at += n;
  return cat(logits, 1);
}

}  // namespace

TEST(KeyValueCache, TokensHaveTheLogitsOfTheFullPass) {
  Index configurations = 0;
  for (const char* pattern : {"dense", "segment:16", "segment:16,dilation=3+dense", "slide:5", "neighborhood:9",
                              "window2d:4x4", "slide2d:1x2", "neighborhood2d:3x5", "slide:3|segment:32,dilation=8",
                              "blocks:8@global_local:1:1", "segment:16,shift=5", "slide:3,dilation=5,stride=4"})
    for (const char* order : {"row", "hilbert", "hilbert,scope=order-only", "snake"})
      for (const Positions positions : {Positions::learned, Positions::rotary}) {
        TransformerConfig c = small(order, pattern);
        c.positions = positions;
        if (positions == Positions::rotary) c.pattern_odd = parse_pattern("slide:2");
        if (positions == Positions::rotary) c.heads = 4, c.width = 16, c.kv_heads = 2, c.keep_order = true;
        const Transformer m = make_transformer(c, 3, DType::f64);
        const Tensor ids = some_ids(2, c.context), all = m.logits(ids);
        const std::vector<Index> ones(64, 1), several{1, 2, 30, 1, 1, 29};
        for (const auto& [run, pieces] : std::vector<std::pair<Index, std::vector<Index>>>{{0, ones},
                                                                                           {0, several},
                                                                                           {0, {63, 1}},
                                                                                           {0, {64}},
                                                                                           {0, {20}},
                                                                                           {24, ones},
                                                                                           {24, several},
                                                                                           {64, {20, 7}}}) {
          KeyValueCache cache(c.context, run);
          const Tensor y = by_pieces(m, cache, ids, pieces);
          EXPECT_EQ(cache.length(), y.dim(1));
          EXPECT_LE(distance(y, slice(all, 1, 0, y.dim(1))), 1e-12)
              << pattern << ", " << order << ", " << name_of(positions) << ", " << pieces.size() << " pieces, runs of "
              << run;
          ++configurations;
        }
      }
  EXPECT_EQ(configurations, 768);
}

TEST(KeyValueCache, OfSixteenBitsAndCleared) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const TransformerConfig c = small("hilbert", "segment:16+slide:3");
    const Transformer m = make_transformer(c, 4, dtype);
    const Tensor ids = some_ids(1, c.context), all = m.logits(ids);
    for (const Index run : {1, 24}) {
      KeyValueCache cache(c.context, run);
      for (int again = 0; again < 2; ++again, cache.clear())
        EXPECT_LE(distance(by_pieces(m, cache, ids, std::vector<Index>(64, 1)), all),
                  dtype == DType::f32 ? 1e-5 : 2e-2);
      // What is there from before is not seen.
      const Tensor one = m.logits(slice(ids, 1, 5, 6), {.cache = &cache});
      KeyValueCache fresh(c.context, run);
      EXPECT_EQ(distance(one, m.logits(slice(ids, 1, 5, 6), {.cache = &fresh})), 0);
    }
  }
}

TEST(KeyValueCache, ReadsTheKeysThatItsPlanLists) {
  TransformerConfig c = small("row", "slide:4");
  c.context = 2048;
  c.width = 8;
  const Transformer m = make_transformer(c, 5);
  const Tensor ids = some_ids(1, 2048);
  KeyValueCache cache(2048);
  (void)m.logits(slice(ids, 1, 0, 2040), {.cache = &cache});
  const Index before = cache.keys_read();
  (void)m.logits(slice(ids, 1, 2040, 2041), {.cache = &cache});
  const Index of_one = cache.keys_read() - before;  // five attend, in tiles of at most 128, in two layers
  EXPECT_GE(of_one, 2 * 5);
  EXPECT_LE(of_one, 2 * 128);

  KeyValueCache in_runs(2048, 64);
  (void)m.logits(slice(ids, 1, 0, 2040), {.cache = &in_runs});
  for (Index i = 0; i < 2; ++i) (void)m.logits(slice(ids, 1, 2040 + i, 2041 + i), {.cache = &in_runs});
  EXPECT_LE(in_runs.keys_read() - before, 2 * 2 * of_one);  // of a plan that lists at most twice as many

  // 64 queries list so many more that each has its own plan.
  c.pattern = parse_pattern("slide:1,dilation=30"), c.order = parse_order("hilbert", 2048);
  const Transformer apart = make_transformer(c, 5);
  KeyValueCache alone(2048), refused(2048, 64);
  for (KeyValueCache* its : {&alone, &refused})
    for (Index i = 0; i < 70; ++i) (void)apart.logits(slice(ids, 1, i, i + 1), {.cache = its});
  EXPECT_LE(refused.keys_read(), 2 * alone.keys_read());

  TransformerConfig dense = c;
  dense.order = parse_order("row", 2048);
  dense.pattern = parse_pattern("dense");
  const Transformer all = make_transformer(dense, 5);
  KeyValueCache of_all(2048);
  (void)all.logits(slice(ids, 1, 0, 1000), {.cache = &of_all});
  const Index dense_before = of_all.keys_read();
  (void)all.logits(slice(ids, 1, 1000, 1001), {.cache = &of_all});
  EXPECT_EQ(of_all.keys_read() - dense_before, 2 * 1024);  // whole tiles up to the token's own
}

TEST(KeyValueCache, RefusesWhatItCannotKeep) {
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string("no error");
  };
  TransformerConfig c = small("row", "dense");
  const Transformer m = make_transformer(c, 6);
  const Tensor ids = some_ids(1, 64);
  KeyValueCache cache(64), short_one(32);
  EXPECT_NE(message([&] { (void)m.logits(ids, {.cache = &short_one}); }).find("context of 32, the model of 64"),
            std::string::npos);
  (void)m.logits(slice(ids, 1, 0, 60), {.cache = &cache});
  EXPECT_NE(message([&] {
              (void)m.logits(slice(ids, 1, 0, 5), {.cache = &cache});
            }).find("5 more tokens after 60 do not fit the context, 64"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)m.logits(some_ids(2, 2), {.cache = &cache}); }).find("2 sequences follow 1"),
            std::string::npos);
  {
    Tape tape;
    tape.watch(m.tokens.weight);
    EXPECT_NE(message([&] { (void)m.logits(ids, {.cache = &cache}); }).find("pause the tape"), std::string::npos);
  }
  c.causality = Causality::none;
  const Transformer both = make_transformer(c, 6);
  KeyValueCache other(64);
  EXPECT_NE(message([&] { (void)both.logits(ids, {.cache = &other}); }).find("use causal token"), std::string::npos);
}
