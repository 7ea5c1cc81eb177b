// Memory that runs out. The N-th allocation of a call fails, for N = 1, 2, .. until the call is
// through without meeting it, in two ways: that one alone, or it and all that follow. Two kinds:
// the memory of tensors, and every `operator new`. Each time:
//   - the call throws, Code::memory where a tensor had no room, else that or std::bad_alloc; or it did
//     without, and its result is right;
//   - the same call on the same objects then succeeds, with the bits of a run that never failed: nothing was
//     left half done;
//   - once the objects of the attempt are gone, so is all it took: bytes of tensors, blocks of the heap, open
//     files.
#include <gtest/gtest.h>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include "../support/error_of.h"
#include "../support/heap.h"
#include "../support/scale.h"
#include "../support/settings.h"
#include "../support/temporary.h"
#include "core/io/npy.h"
#include "examples/train/tasks/task.h"
#include "nn/checkpoint.h"
#include "nn/optimizer.h"
#include "nn/transformer.h"
#include "ops/hilbert/plan/order.h"

namespace hilt {
namespace {

using heap::Of;

// ---- the sweep ----------------------------------------------------------------------------------

/// What a process must not have more of after a failure than before.
struct Held {
  std::size_t live;
  long heap;
  std::ptrdiff_t files;
  friend bool operator==(const Held&, const Held&) = default;
  friend std::ostream& operator<<(std::ostream& os, const Held& h) {
    return os << h.live << " B of tensors, " << h.heap << " blocks, " << h.files << " files";
  }
};
Held held() {
  // What the library keeps on purpose is made the same every time, and cold: 16 plans, 8 tables of
  // rotary angles, orders, freed tensors.
  for (Index i = 1; i <= 16; ++i) {
    PlanSpec spec;
    spec.length = i;
    make_plan(spec);
  }
  for (int i = 2; i < 10; ++i) rotary(zeros({1, 1, 2}), i);
  permutation_cache().clear();
  release_pool();
  const MemoryStats s = memory_stats();
  const long heap = heap::blocks;
  using Entries = std::filesystem::directory_iterator;
  return {s.live, heap, std::distance(Entries("/proc/self/fd"), Entries())};
}

/// What the call throws while the n-th allocation fails; `met` if there was an n-th.
template <class Call> std::string failure_of(Of of, bool for_ever, long n, bool& met, Call&& call) {
  std::exception_ptr thrown;
  heap::failing = {of, n, for_ever, false};
  try {
    call();
  } catch (...) { thrown = std::current_exception(); }
  met = heap::failing.met;
  heap::failing = {};
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) { return "bad_alloc"; } catch (...) {
    return error_of([&] { std::rethrow_exception(thrown); });
  }
  return "nothing";
}

/// make() gives the objects of an attempt, run(objects) is the call, bits(objects) what it did;
/// unharmed(objects) looks at them after a failure.
template <class Make, class Run, class Bits, class Unharmed>
void sweep(const char* name, Make make, Run run, Bits bits, Unharmed unharmed) {
  const Threads one(1);  // allocations have an order
  const PoolLimit none(0);
  const auto untroubled = [&] {
    auto objects = make();
    run(objects);
    return bits(objects);
  };
  const std::string expected = untroubled();
  ASSERT_EQ(untroubled(), expected) << name;
  for (const Of of : {Of::tensors, Of::everything}) {
    for (const bool for_ever : {false, true}) {
      constexpr long kNever = 1L << 40;
      long points = 0, did_without = 0, all = 0;
      {
        auto objects = make();
        heap::failing = {of, kNever};
        run(objects);
        all = kNever - std::exchange(heap::failing, {}).left;
      }
      for (long n = 1;; n += scaled(1L, 1 + all / 70)) {
        const Held before = held();
        const auto where = [&] {
          const std::string nth = (of == Of::tensors ? ": tensor " : ": allocation ") + std::to_string(n);
          return name + nth + (for_ever ? " and all later failing" : " failing");
        };
        bool met = false;
        {
          auto objects = make();
          const std::string why = failure_of(of, for_ever, n, met, [&] { run(objects); });
          if (why == "nothing") {
            did_without += met;
          } else {
            ASSERT_TRUE(met) << where() << ": " << why;
            ASSERT_TRUE(why.starts_with("memory: ") || (of == Of::everything && why == "bad_alloc"))
                << where() << ": " << why;
            unharmed(objects);
            ASSERT_FALSE(testing::Test::HasFatalFailure()) << where();
            const std::string again = error_of([&] { run(objects); });
            ASSERT_EQ(again, "nothing") << "the same call after " << where();
          }
          ASSERT_TRUE(bits(objects) == expected) << "other bits after " << where();
        }
        ASSERT_EQ(held(), before) << "left behind by " << where();
        if (!met) break;
        ++points;
      }
      std::printf("[ no memory] %s: %ld %s failed, %s; %ld of them done without\n", name, points,
                  of == Of::tensors ? "tensors" : "allocations", for_ever ? "with all later ones" : "one at a time",
                  did_without);
    }
  }
}

void nothing_to_see(const auto&) {}

void append(std::string& out, const Tensor& x) {
  const Tensor d = dense(x);
  out.append(reinterpret_cast<const char*>(d.raw()), d.bytes());
}

// ---- a model, its training, its files -----------------------------------------------------------

struct Trained {
  Transformer model;
  AdamWOptimizer optimizer{AdamW{}};
  Generator noise{3};

  std::vector<SafetensorsItem> items() {
    std::vector<SafetensorsItem> out;
    for (const NamedParameter& p : parameters_of(model)) out.push_back({"model." + p.name, *p.tensor});
    optimizer.visit_state([&](const std::string& name, Tensor& t) { out.push_back({"optimizer." + name, t}); });
    return out;
  }
  std::string bits() {
    std::string out = std::to_string(optimizer.steps());
    for (const SafetensorsItem& item : items()) append(out += item.name, item.tensor);
    return out;
  }
};

TransformerConfig plain() {
  TransformerConfig c;
  c.layers = 1, c.heads = 2, c.width = 8, c.context = 16, c.vocab = 11;
  c.order = parse_order("hilbert:4x4", c.context);
  c.pattern = parse_pattern("segment:4");
  return c;
}
/// All that plain() does without: noise, a checkpoint, rotary positions, gated layers, rows in
/// curve order, the tape's own backward.
TransformerConfig fancy() {
  TransformerConfig c = plain();
  c.dropout = 0.1, c.checkpointing = true, c.keep_order = true;
  c.positions = Positions::rotary, c.norm = NormKind::rms, c.activation = Activation::silu_gated,
  c.backward = Backward::taped;
  return c;
}
/// And what is left: the hybrid backward, keys that heads share, two patterns at once, a head of
/// its own.
TransformerConfig mixed() {
  TransformerConfig c = plain();
  c.layers = 2, c.kv_heads = 1, c.tie_weights = false, c.backward = Backward::hybrid;
  c.pattern = parse_pattern("window2d:2x2+slide2d:3x3");
  return c;
}
Trained made(const TransformerConfig& config, DType dtype) { return {make_transformer(config, 1, dtype)}; }

void train(Trained& t) {
  static const Tensor ids = randint(0, 11, {2, 16}, {5, 1}), targets = randint(0, 11, {2, 16}, {5, 2});
  t.noise.set_state({3, 0});
  const NamedParameters parameters = parameters_of(t.model);
  Tape tape;
  watch_parameters(tape, t.model);
  Gradients g = tape.backward(t.model.loss(ids, targets, {.noise = &t.noise}));
  clip_grad_norm(g, parameters, 1e-3);
  t.optimizer.step(parameters, g, 0.01);
}

TEST(NoMemory, MakingAModel) {
  struct Made {
    std::optional<Trained> trained;
  };
  sweep(
      "making a model", [] { return Made{}; },
      [](Made& m) {
        m.trained = made(fancy(), DType::bf16);
        m.trained->optimizer.prepare(parameters_of(m.trained->model));
      },
      [](Made& m) { return m.trained->bits(); }, nothing_to_see<Made>);
}

void sweep_of_training(const char* name, const TransformerConfig& config, DType dtype) {
  std::string before;
  sweep(
      name,
      [&] {
        Trained t = made(config, dtype);
        train(t);  // the second step then finds moments that are not 0
        before = t.bits();
        return t;
      },
      train, [](Trained& t) { return t.bits(); },
      [&](Trained& t) { ASSERT_TRUE(t.bits() == before) << "half an update"; });
}
TEST(NoMemory, AStepOfTraining) { sweep_of_training("a step", plain(), DType::f32); }
TEST(NoMemory, AStepOfTrainingWithEverything) { sweep_of_training("a step with everything", fancy(), DType::bf16); }
TEST(NoMemory, AStepOfTrainingInF64) { sweep_of_training("a step in f64", mixed(), DType::f64); }

TEST(NoMemory, TheFirstStepOfTraining) {
  sweep(
      "the first step", [] { return made(plain(), DType::bf16); }, train, [](Trained& t) { return t.bits(); },
      [](Trained& t) { ASSERT_EQ(t.optimizer.steps(), 0); });
}

const SafetensorsMetadata kMetadata{{"config.lr", "0.001"}, {"vocabulary", "characters:\n\"\\\u20ac"}};

TEST(NoMemory, WritingACheckpoint) {
  const Temporary dir;
  Trained t = made(plain(), DType::f32);
  const std::vector<SafetensorsItem> old = {{"model.w", full({3}, 1)}};
  std::vector<SafetensorsItem> items = t.items();
  items.push_back({"not dense", transpose(randn({3, 5}, {1, 1}))});
  save_checkpoint(dir.directory(), 1, old, kMetadata, 2);
  save_checkpoint(dir.directory(), 2, old, kMetadata, 2);
  const std::string first = dir.content(checkpoint_name(1));
  const std::vector<std::string> before = dir.names();
  struct Nothing {};
  sweep(
      "writing a checkpoint",
      [&] {
        dir.file(checkpoint_name(1), first);
        std::filesystem::remove(dir.path(checkpoint_name(3)));
        return Nothing{};
      },
      [&](Nothing) { save_checkpoint(dir.directory(), 3, items, kMetadata, 2); },
      [&](Nothing) {
        std::string out = dir.content(checkpoint_name(3));
        for (const std::string& file : dir.names()) out += ' ' + file;
        return out;
      },
      [&](Nothing) {
        ASSERT_EQ(dir.names(), before);
        std::vector<SafetensorsItem> back = {{"model.w", zeros({3})}};
        Checkpoint(dir.path(checkpoint_name(2))).read(back);
        ASSERT_EQ(back[0].tensor.to_vector(), std::vector<double>(3, 1));
      });
}

TEST(NoMemory, ReadingACheckpoint) {
  const Temporary dir;
  Trained written = made(plain(), DType::bf16);
  train(written);
  save_checkpoint(dir.directory(), 1, written.items(), kMetadata, 2);
  std::string before;
  sweep(
      "reading a checkpoint",
      [&] {
        Trained t = made(plain(), DType::bf16);
        t.optimizer.prepare(parameters_of(t.model));
        before = t.bits();
        return t;
      },
      [&](Trained& t) {
        std::vector<SafetensorsItem> items = t.items();
        const Checkpoint c(dir.path(checkpoint_name(1)));
        c.read(items);
      },
      [](Trained& t) { return t.bits(); },
      [&](Trained& t) { ASSERT_TRUE(t.bits() == before) << "half of a checkpoint"; });
}

TEST(NoMemory, AFileOfNumPy) {
  const Temporary dir;
  const std::string path = dir.path("x.npy");
  const Tensor x = transpose(randn({3, 5}, {1, 1}));  // dense only after a copy
  write_npy(path, zeros({2}));
  const std::string old = dir.content("x.npy");
  struct File {
    Tensor back;
  };
  sweep(
      "a .npy file", [&] { return dir.file("x.npy", old), File{}; },
      [&](File& f) {
        write_npy(path, x);
        f.back = read_npy(path);
      },
      [](File& f) {
        std::string out;
        return append(out, f.back), out;
      },
      [&](File&) { ASSERT_EQ(dir.names(), std::vector<std::string>{"x.npy"}); });
}

TEST(NoMemory, RowsOfAText) {
  const Temporary dir;
  std::string text;
  for (int i = 0; i < 300; ++i) text += std::string("a b\u20ac") + static_cast<char>('a' + i % 26);
  const std::string path = dir.file("text", text);
  struct Read {
    std::string vocabulary;
    Batch batch;
  };
  sweep(
      "rows of a text", [] { return Read{}; },
      [&](Read& r) {
        const auto task = train::text_task(path, train::Alphabet::characters, 20, 1);
        r.vocabulary = task->vocabulary().text();
        r.batch = task->batch(train::Split::train, 3, 4);
      },
      [](Read& r) {
        std::string out = r.vocabulary;
        return append(out, r.batch.inputs), append(out, r.batch.targets), out;
      },
      nothing_to_see<Read>);
}

// ---- smaller calls ------------------------------------------------------------------------------

// A caller that catches the error may go on with the same tape: the op or watch that failed left
// nothing behind.
TEST(NoMemory, OneTapeGoesOn) {
  struct Recorded {
    Tensor x = randn({3, 4}, {1, 1}), w = randn({4, 4}, {1, 2});
    std::unique_ptr<Tape> tape = std::make_unique<Tape>(Tape::Options{.profile = true});
    Tensor a, b, c, loss;
  };
  sweep(
      "one tape",
      [] {
        Recorded made;
        release_pool();  // with it blocks that this thread keeps, which lists of a tape would take
        return made;
      },
      [](Recorded& r) {
        for (const Tensor& t : {r.x, r.w}) r.tape->watch(t);
        if (!r.a) r.a = matmul(r.x, r.w);
        if (!r.b) r.b = matmul(r.a, r.w);
        if (!r.c) r.c = gelu(r.b);
        if (!r.loss) r.loss = mean(square(r.c));
      },
      [](Recorded& r) {
        const Gradients g = r.tape->backward(r.loss);
        std::string out;
        append(out, g[r.x]), append(out, g[r.w]);
        return out;
      },
      nothing_to_see<Recorded>);
}

// From a mebibyte on, the pool has a list of blocks by name.
TEST(NoMemory, LargeTensorsFromThePool) {
  struct Large {
    Tensor x;
  };
  sweep(
      "large tensors", [] { return Large{}; },
      [](Large& l) {
        const PoolLimit some(std::size_t{64} << 20);
        for (int i = 0; i < 2; ++i) empty({1 << 19});  // the second is the first again
        l.x = full({1 << 18}, 2);
        release_pool();
      },
      [](Large& l) { return std::to_string(l.x.to_vector()[77]); }, nothing_to_see<Large>);
}

// A job needs no further thread: without room for one it is done by those there are.
TEST(NoMemory, ThreadsThatCannotBeStarted) {
  const Threads many(40);
  std::vector<int> seen(4000);
  bool met = false;
  const auto count = [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
  };
  EXPECT_EQ(failure_of(Of::everything, true, 1, met, [&] { parallel_for(4000, 1, count); }), "nothing");
  EXPECT_TRUE(met);
  EXPECT_EQ(std::ranges::count(seen, 1), 4000);
}

}  // namespace
}  // namespace hilt
