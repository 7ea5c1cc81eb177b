// Tokens drawn from logits by hand, and texts that go on as a model without a cache goes on.
#include "nn/transformer.h"
#include "tests/nn/modules.h"
#include "tests/support/error_of.h"

namespace hilt {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// How many of so many evenly spaced points fall on each token.
std::vector<Index> shares(const std::vector<float>& logits, const Sampling& how, Index points = 1000) {
  std::vector<Index> count(logits.size(), 0);
  for (Index i = 0; i < points; ++i)
    ++count[static_cast<std::size_t>(
        draw_token(logits, how, (static_cast<double>(i) + 0.5) / static_cast<double>(points)))];
  return count;
}

TEST(DrawToken, ByTheSoftmaxOfTheLogits) {
  const std::vector<float> logits{std::log(0.1f), std::log(0.6f), std::log(0.3f), -kInf};
  const std::vector<Index> one = shares(logits, {});
  EXPECT_NEAR(static_cast<double>(one[0]), 100, 1);
  EXPECT_NEAR(static_cast<double>(one[1]), 600, 1);
  EXPECT_NEAR(static_cast<double>(one[2]), 300, 1);
  EXPECT_EQ(one[3], 0);
  const std::vector<Index> half = shares(logits, {.temperature = 0.5});  // squares: 1, 36 and 9 of 46
  EXPECT_NEAR(static_cast<double>(half[1]), 1000 * 36 / 46.0, 1);
  EXPECT_NEAR(static_cast<double>(half[0]), 1000 * 1 / 46.0, 1);
  EXPECT_EQ(draw_token(logits, {}, 0), 1) << "the likeliest comes first";
}

TEST(DrawToken, TheLikeliestOnly) {
  const std::vector<float> logits{std::log(0.1f), std::log(0.6f), std::log(0.3f)};
  EXPECT_EQ(shares(logits, {.temperature = 0}), (std::vector<Index>{0, 1000, 0}));
  EXPECT_EQ(shares(logits, {.top_k = 1}), (std::vector<Index>{0, 1000, 0}));
  const std::vector<Index> two = shares(logits, {.top_k = 2});
  EXPECT_EQ(two[0], 0);
  EXPECT_NEAR(static_cast<double>(two[1]), 1000 * 6 / 9.0, 1);
  EXPECT_EQ(shares(logits, {.top_p = 0.8}), two) << "0.6 is less than 0.8, with 0.3 it is more";
  EXPECT_EQ(shares(logits, {.top_p = 0.5}), (std::vector<Index>{0, 1000, 0}));
  EXPECT_EQ(shares(logits, {.top_p = 0}), (std::vector<Index>{0, 1000, 0})) << "one is always kept";
  EXPECT_EQ(shares(logits, {.top_k = 100}), shares(logits, {}));
  const std::vector<float> equal{1, 2, 2, 2};
  EXPECT_EQ(shares(equal, {.temperature = 0}), (std::vector<Index>{0, 1000, 0, 0}));
  EXPECT_EQ(shares(equal, {.top_k = 2}), (std::vector<Index>{0, 500, 500, 0})) << "of equals the lower one";
}

Transformer small(Index context) {
  TransformerConfig c;
  c.layers = 2, c.heads = 2, c.width = 12, c.context = context, c.vocab = 11, c.pattern = parse_pattern("slide:3");
  return shaken(make_transformer(c, 3), 0.5);
}
Index likeliest(const Transformer& model, const std::vector<std::int32_t>& tokens) {  // without a cache
  return argmax(model.last_logits(from_values(tokens, {1, std::ssize(tokens)}))).to_vector<Index>()[0];
}

TEST(Generate, GoesOnAsTheModelWithoutACache) {
  const Transformer model = small(32);
  std::vector<std::int32_t> expected{1, 2, 3};
  for (int i = 0; i < 20; ++i) expected.push_back(static_cast<std::int32_t>(likeliest(model, expected)));
  KeyValueCache cache(32);
  const std::vector<std::int32_t> some = generate(model, cache, {1, 2, 3}, 8, {.temperature = 0}, {});
  EXPECT_EQ(some, std::vector<std::int32_t>(expected.begin(), expected.begin() + 11));
  EXPECT_EQ(cache.length(), 10) << "all but the one that was drawn last";
  EXPECT_EQ(generate(model, cache, some, 12, {.temperature = 0}, {}), expected) << "from where it stood";
}

TEST(Generate, InAFullContextTheOlderHalfIsForgotten) {
  const Transformer model = small(8);
  for (const Index boundary : {-1, 4}) {
    std::vector<std::int32_t> expected{4, 2, 3};
    std::size_t from = 0;
    for (int i = 0; i < 30; ++i) {
      if (expected.size() - from > 8) {
        from = expected.size() - 4;
        for (std::size_t k = from; boundary >= 0 && k < expected.size(); ++k)
          if (expected[k] == boundary) {
            from = k;
            break;
          }
      }
      expected.push_back(static_cast<std::int32_t>(
          likeliest(model, {expected.begin() + static_cast<std::ptrdiff_t>(from), expected.end()})));
    }
    KeyValueCache cache(8);
    EXPECT_EQ(generate(model, cache, {4, 2, 3}, 30, {.temperature = 0, .boundary = boundary}, {}), expected)
        << boundary;
  }
  KeyValueCache cache(8);
  EXPECT_EQ(generate(model, cache, std::vector<std::int32_t>(20, 1), 1, {}, {}).size(), 21u) << "a long prompt";
}

TEST(Generate, DrawsDependOnTheKeyAlone) {
  const Transformer model = small(32);
  const auto text = [&](RandomKey key) {
    KeyValueCache cache(32);
    return generate(model, cache, {1}, 24, {.temperature = 2}, key);
  };
  EXPECT_EQ(text({1, 2}), text({1, 2}));
  EXPECT_NE(text({1, 2}), text({1, 3}));
  EXPECT_NE(text({1, 2}), text({2, 2}));
  EXPECT_NE(text({1, 2}), text({1, 2 + (std::uint64_t{1} << 32)}));
  const std::vector<std::int32_t> first = text({1, 2});
  std::vector<std::int32_t> told;
  KeyValueCache cache(32);
  const std::vector<std::int32_t> five =
      generate(model, cache, {1}, 24, {.temperature = 2}, {1, 2}, [&](std::int32_t token) {
        told.push_back(token);
        return told.size() < 5;
      });
  EXPECT_EQ(five, std::vector<std::int32_t>(first.begin(), first.begin() + 6));
  EXPECT_EQ(told, std::vector<std::int32_t>(first.begin() + 1, first.begin() + 6));
}

TEST(Generate, SaysWhatIsWrong) {
  Transformer model = small(8);
  KeyValueCache cache(8);
  generate(model, cache, {1, 2, 3}, 1, {}, {});
  EXPECT_EQ(error_of([&] {
              generate(model, cache, {1, 2, 3}, 1, {}, {});
            }),
            "usage: generate: the cache has 3 tokens, and there are 3 to go on from");
  EXPECT_EQ(error_of([&] { draw_token({}, {}, 0); }), "usage: draw_token: there are no logits");
  const auto refused = [](const std::vector<float>& logits, const Sampling& how = {}, double point = 0) {
    return error_of([&] { draw_token(logits, how, point); });
  };
  for (const Sampling& how : {Sampling{.top_k = -1}, {.temperature = NAN}, {.top_p = 1.5}, {.top_p = NAN}})
    EXPECT_TRUE(refused({1}, how).starts_with("usage: draw_token: temperature "));
  EXPECT_EQ(refused({1}, {.top_p = 0.5}, 1),
            "usage: draw_token: temperature 1, top_p 0.5, top_k 0 and point 1 must not be negative, top_p at most 1 "
            "and point below 1");
  EXPECT_EQ(refused({NAN, 1}), "not_a_number: draw_token: the logits hold nan");
  EXPECT_EQ(refused({1, kInf}), "not_a_number: draw_token: the logits hold inf");
  EXPECT_EQ(refused({-kInf, -kInf}), "not_a_number: draw_token: the logits hold only -inf");
  model.norm.weight = full({12}, NAN);
  cache.clear();
  EXPECT_EQ(error_of([&] { generate(model, cache, {1}, 2, {}, {}); }),
            "not_a_number: generate: token 1 of 2: the logits hold nan");
}

}  // namespace
}  // namespace hilt
