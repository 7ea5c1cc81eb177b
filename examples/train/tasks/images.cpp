// Images as tasks: pixels become patches here, whether they are drawn or come from a file.
#include "images.h"
#include <algorithm>
#include <cmath>
#include <numeric>

namespace train {

using namespace hilt;

namespace {

class PatchTask : public Task {
 public:
  PatchTask(const Patches& patches, Index channels, Index classes, std::uint64_t seed)
      : patches_(patches), channels_(channels) {
    seed_ = seed;
    length_ = checked_mul(patches.height, patches.width, "images"), targets_ = 1, classes_ = classes;
    tokens_ = checked_mul(checked_mul(patches.side, patches.side, "images"), channels, "images");
  }

  Batch batch(Split split, Index first, Index count) const override {
    check(count >= 1 && first >= 0, "batch: ", count, " rows from row ", first);
    Batch b{empty({count, length_, tokens_}, DType::f32), empty({count, 1}, DType::i32)};
    float* const inputs = b.inputs.mutable_data<float>();
    std::int32_t* const targets = b.targets.mutable_data<std::int32_t>();
    const Index side = patches_.side, run = side * channels_, line = patches_.width * run;  // pixels of a line
    parallel_for(count, 1, [&](Index begin, Index end) {
      std::vector<float> pixels(at(length_ * tokens_));
      for (Index r = begin; r < end; ++r) {
        targets[r] = image(split, first + r, pixels);
        float* to = inputs + r * length_ * tokens_;
        for (Index t = 0; t < length_; ++t)
          for (Index y = 0; y < side; ++y, to += run)
            std::copy_n(&pixels[at((t / patches_.width * side + y) * line + t % patches_.width * run)], run, to);
      }
    });
    return b;
  }
  /// For yardsticks, which know labels alone.
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    std::vector<float> pixels(at(length_ * tokens_));
    targets[0] = image(split, number, pixels);
    std::fill_n(inputs, length_, 0);
  }

 protected:
  /// Writes the pixels of an image, channels inside, lines outside; its label.
  virtual std::int32_t image(Split split, Index number, std::span<float> pixels) const = 0;
  Patches patches_;
  Index channels_;
};

constexpr std::array<const char*, 6> kShapes{"disc", "ring", "square", "frame", "plus", "cross"};

bool is_inside(std::size_t shape, double u, double v) {
  constexpr double kInner = 0.6, kSide = 0.85, kArm = 0.3;
  const double radius = std::hypot(u, v), side = std::max(std::abs(u), std::abs(v)) / kSide;
  const auto arms = [](double a, double b) {
    return std::min(std::abs(a), std::abs(b)) < kArm && std::max(std::abs(a), std::abs(b)) < 1;
  };
  switch (shape) {
    case 0: return radius < 1;
    case 1: return radius < 1 && radius > kInner;
    case 2: return side < 1;
    case 3: return side < 1 && side > kInner;
    case 4: return arms(u, v);
    default: return arms((u + v) * std::sqrt(0.5), (u - v) * std::sqrt(0.5));
  }
}

class ShapesTask : public PatchTask {
 public:
  ShapesTask(const Patches& patches, std::uint64_t seed) : PatchTask(patches, 1, std::ssize(kShapes), seed) {
    identity_ = {{"images.checksum", "shapes"}};
  }
  std::string name_of(Index c) const override { return kShapes[at(c)]; }

 private:
  std::int32_t image(Split split, Index number, std::span<float> pixels) const override {
    Draws draws = drawn(split, number);
    const auto between = [&](double low, double high) { return low + (high - low) * draws.uniform(); };
    constexpr double kNoise = 1;
    const Index height = patches_.height * patches_.side, width = patches_.width * patches_.side;
    const auto shape = draws.below(std::ssize(kShapes));
    const double radius = between(0.2, 0.35) * static_cast<double>(std::min(height, width));
    const double y = between(radius, static_cast<double>(height) - radius),
                 x = between(radius, static_cast<double>(width) - radius);
    for (Index i = 0; i < height * width; ++i) {
      const double v = static_cast<double>(i / width) + 0.5 - y, u = static_cast<double>(i % width) + 0.5 - x;
      pixels[at(i)] = static_cast<float>(is_inside(at(shape), u / radius, v / radius) + between(-kNoise, kNoise));
    }
    return static_cast<std::int32_t>(shape);
  }
};

Tensor read_images(const std::string& path) {
  const Tensor x = read_npy(path);
  if ((x.rank() != 3 && x.rank() != 4) || x.numel() == 0)
    fail_with(Code::data, "--images (", path, "): has shape ", x.shape(), "; expected [N, H, W] or [N, H, W, C]");
  return x;
}

class ImagesTask : public PatchTask {
 public:
  ImagesTask(const std::string& path, const std::string& labels, const Patches& patches, std::uint64_t seed,
             const Tensor& read)
      : PatchTask(patches, read.rank() == 4 ? read.dim(3) : 1, 0, seed), pixels_(contiguous(to(read, DType::f32))) {
    const auto bad = [&](const auto&... parts) { fail_with(Code::data, "--images (", path, "): ", parts...); };
    const Index count = read.dim(0), height = patches.height * patches.side, width = patches.width * patches.side;
    if (read.dim(1) != height || read.dim(2) != width)
      bad("images of ", read.dim(1), "x", read.dim(2), " pixels; --grid ", patches.height, "x", patches.width,
          " of patches of --patch ", patches.side, " are ", height, "x", width);
    if (count < 2) bad("has 1 image; at least 2 are needed, for training and for validation");
    float* const x = pixels_.mutable_data<float>();
    double sum = 0, squares = 0;
    for (Index i = 0; i < pixels_.numel(); ++i) {
      if (!std::isfinite(x[i]))
        bad("image ", i / (pixels_.numel() / count), " has a pixel that is ", x[i], "; pixels are finite in f32");
      sum += x[i], squares += static_cast<double>(x[i]) * x[i];
    }
    const auto n = static_cast<double>(pixels_.numel()), mean = sum / n, spread = std::sqrt(squares / n - mean * mean);
    std::uint64_t checksum = hilt::checksum(0, x, pixels_.bytes());
    for (Index i = 0; i < pixels_.numel(); ++i) x[i] = static_cast<float>((x[i] - mean) / (spread > 0 ? spread : 1));
    read_labels(labels, count);
    checksum = hilt::checksum(checksum, labels_.data(), labels_.size() * sizeof labels_[0]);
    identity_ = {{"images.checksum", std::to_string(checksum)}};
    order_.resize(at(count));
    std::iota(order_.begin(), order_.end(), Index{0});
    Draws draws({0, 0});  // files are sorted now and then
    for (Index i = count - 1; i > 0; --i) std::swap(order_[at(i)], order_[at(draws.below(i + 1))]);
    held_out_ = std::max<Index>(1, count / 10);
  }

 private:
  void read_labels(const std::string& path, Index count) {
    constexpr std::int64_t kMostClasses = 1 << 16;
    const auto bad = [&](const auto&... parts) { fail_with(Code::data, "--labels (", path, "): ", parts...); };
    const NpyIntegers read = read_npy_integers(path);
    if (is_floating(read.dtype)) bad("is ", read.dtype, "; labels are integers");
    if (read.shape != Shape{count}) bad("has shape ", read.shape, "; expected [", count, "], a label for each image");
    for (std::size_t i = 0; i < read.values.size(); ++i) {
      const std::int64_t label = read.values[i];
      if (label < 0 || label >= kMostClasses)
        bad("label ", label, " of image ", i, " is outside 0..", kMostClasses - 1);
      labels_.push_back(static_cast<std::int32_t>(label));
      classes_ = std::max<Index>(classes_, label + 1);
    }
  }
  std::int32_t image(Split split, Index number, std::span<float> pixels) const override {
    const Index trained = std::ssize(order_) - held_out_;
    Draws draws({seed_, static_cast<std::uint64_t>(number)});
    const Index place = split == Split::train ? draws.below(trained) : trained + number % held_out_;
    const Index which = order_[at(place)];
    std::copy_n(pixels_.data<float>() + which * length_ * tokens_, length_ * tokens_, pixels.begin());
    return labels_[at(which)];
  }

  Tensor pixels_;  // f32 [N, H, W, C]
  std::vector<std::int32_t> labels_;
  std::vector<Index> order_;  // of images: those for training, then those held out
  Index held_out_ = 0;
};

}  // namespace

std::unique_ptr<Task> shapes_task(const Patches& patches, std::uint64_t seed) {
  return std::make_unique<ShapesTask>(patches, seed);
}

std::unique_ptr<Task> images_task(const std::string& images, const std::string& labels, const Patches& patches,
                                  std::uint64_t seed) {
  return std::make_unique<ImagesTask>(images, labels, patches, seed, read_images(images));
}

Patches patches_of(const std::string& images, Index side) {
  const Tensor x = read_images(images);
  check(x.dim(1) % side == 0 && x.dim(2) % side == 0, "--patch (", side, "): --images (", images, ") has images of ",
        x.dim(1), "x", x.dim(2), " pixels, which are not whole patches; name a divisor of both sides");
  return {x.dim(1) / side, x.dim(2) / side, side};
}

}  // namespace train
