// GPT-2's weights and logits as another implementation has them; golden/make_gpt2.py says which.
#include "nn/training.h"
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <unistd.h>
#include "core/io/npy.h"
#include "tests/nn/modules.h"
#include "core/io/safetensors.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary.h"

namespace hilt {
namespace {

std::string golden(const std::string& name) {
  const char* const source = std::getenv("SRC");
  const std::filesystem::path here =
      source ? std::filesystem::path(source) / "tests" / "nn" : std::filesystem::path(__FILE__).parent_path();
  return (here / "golden" / name).string();
}

/// The golden file with its tensors changed, written anew.
std::string changed(const Temporary& directory, const std::function<void(std::vector<SafetensorsItem>&)>& change) {
  const SafetensorsFile file(golden("gpt2.safetensors"));
  std::vector<SafetensorsItem> items;
  for (const SafetensorsEntry& e : file.entries()) items.push_back({e.name, file.read(e.name)});
  change(items);
  const std::string path = directory.path("changed.safetensors");
  write_safetensors(path, items);
  return path;
}
SafetensorsItem& named(std::vector<SafetensorsItem>& items, const std::string& name) {
  return *std::ranges::find(items, name, &SafetensorsItem::name);
}

void expect_golden_logits(const Transformer& m, double tolerance = 1e-5) {
  const std::vector<double> got = m.logits(read_npy(golden("gpt2_tokens.npy"))).to_vector(),
                            want = read_npy(golden("gpt2_logits.npy")).to_vector();
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << i;
}

TEST(Gpt2, LogitsAreThoseOfAnotherImplementation) {
  Transformer m = load_gpt2(golden("gpt2.safetensors"), 4);
  EXPECT_EQ(m.config.layers, 2);
  EXPECT_EQ(m.config.width, 32);
  EXPECT_EQ(m.config.context, 16);
  EXPECT_EQ(m.config.vocab, 61);
  EXPECT_EQ(m.config.hidden_width(), 128);
  expect_golden_logits(m);
  for (const Backward mode : {Backward::taped, Backward::hybrid}) {
    for (Block& b : m.blocks) b.attention.config.backward = mode;
    expect_golden_logits(m);
  }
  expect_golden_logits(load_gpt2(golden("gpt2.safetensors"), 4, DType::f64));
}

TEST(Gpt2, NamesWithoutThePrefixAndOldMasksLoadToo) {
  const Temporary directory;
  expect_golden_logits(load_gpt2(changed(directory,
                                         [](auto& items) {
                                           for (SafetensorsItem& i : items)
                                             i.name = i.name.substr(std::string("transformer.").size());
                                           items.push_back({"h.0.attn.bias", ones({1, 1, 16, 16}, DType::u8)});
                                           items.push_back({"h.0.attn.masked_bias", full({}, -1e4)});
                                         }),
                                 4));
}

TEST(Gpt2, AHeadOfItsOwnIsUsed) {
  const Temporary directory;
  const auto with_head = [&](double factor) {
    return load_gpt2(
        changed(directory,
                [&](auto& items) {
                  items.push_back({"lm_head.weight", mul(named(items, "transformer.wte.weight").tensor, factor)});
                }),
        4);
  };
  const Transformer tied = with_head(1), untied = with_head(2);
  EXPECT_TRUE(tied.config.tie_weights);
  expect_golden_logits(tied);
  EXPECT_FALSE(untied.config.tie_weights);
  const Tensor ids = read_npy(golden("gpt2_tokens.npy"));
  EXPECT_LE(distance(untied.logits(ids), mul(tied.logits(ids), 2.0)), 1e-5);
}

TEST(Gpt2, SaysWhichTensorIsWrong) {
  const Temporary directory;
  const auto refused = [&](const std::function<void(std::vector<SafetensorsItem>&)>& change, Index heads = 4) {
    const std::string path = changed(directory, change);
    std::string error = error_of([&] { (void)load_gpt2(path, heads); });
    if (const std::size_t at = error.find(path); at != error.npos) error.replace(at, path.size(), "FILE");
    return error;
  };
  const auto without = [](const std::string& name) {
    return [name](std::vector<SafetensorsItem>& items) {
      std::erase_if(items, [&](const SafetensorsItem& i) { return i.name == name; });
    };
  };
  EXPECT_EQ(refused(without("transformer.h.1.mlp.c_proj.bias")),
            "data: load_gpt2: tensor (transformer.h.1.mlp.c_proj.bias) is missing, FILE; is this a GPT-2 model?");
  EXPECT_EQ(refused(without("transformer.wte.weight")),
            "data: load_gpt2: tensor (transformer.wte.weight) is missing, FILE; is this a GPT-2 model?");
  const auto offset_of = [&](const std::string& name) {
    const SafetensorsFile changed(directory.path("changed.safetensors"));
    return std::to_string(changed.find(name)->begin);
  };
  const std::string extra = refused([](auto& items) { items.push_back({"transformer.h.0.attn.rotary", zeros({2})}); });
  EXPECT_EQ(extra, "data: load_gpt2: tensor (transformer.h.0.attn.rotary) is not one of GPT-2's, FILE:" +
                       offset_of("transformer.h.0.attn.rotary") + "; remove it or load another model");
  const std::string turned = refused([](auto& items) {
    named(items, "transformer.h.1.attn.c_attn.weight").tensor = zeros({96, 32});
  });
  EXPECT_EQ(
      turned,
      "data: load_gpt2: tensor transformer.h.1.attn.c_attn.weight (f32[96, 32]): expected floats of [32, 96], FILE:" +
          offset_of("transformer.h.1.attn.c_attn.weight") + "; width, layers and context come from the other tensors");
  EXPECT_EQ(refused([](auto&) {}, 5), "usage: width 32 is not divisible by 5 heads; the nearest are 30 and 35");
}

}  // namespace
}  // namespace hilt
