// The judge of a GPU: every case of every op there, in each type and layout, against the same op on
// the CPU.
//
// The referee is the CPU in f64 on the same (rounded) numbers. In the mean square over all elements
// an output or gradient may be off by twice what the CPU is in the same type, and by four
// roundings. A second run must give the same bits, and inputs with all that lies between and around
// their elements must stay as they were.
#include <cmath>
#include <cstring>
#include "core/cuda/context.h"
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt::judge {
namespace {

const Device kGpu{Device::Kind::cuda, 0};
constexpr double kRoundings = 4;

/// The whole storage behind a tensor, on the GPU, and the same window on it.
struct OnGpu {
  Tensor block, tensor;
  std::vector<std::uint8_t> before;
  explicit OnGpu(const Tensor& x) {
    const Tensor bytes(x.storage(), {static_cast<Index>(x.storage().bytes())}, DType::u8);
    block = moved(bytes, kGpu);
    before = bytes.to_vector<std::uint8_t>();
    tensor = Tensor(block.storage(), x.shape(), x.strides(), x.offset(), x.dtype());
  }
  bool untouched() const { return block.to_vector<std::uint8_t>() == before; }
};

double epsilon_of(DType type) { return type == DType::f32 ? 0x1p-24 : type == DType::bf16 ? 0x1p-9 : 0x1p-12; }

std::string compare(std::string_view what, const Tensor& gpu, const Tensor& cpu, const Tensor& exact, DType type,
                    int steps) {
  if (gpu.shape() != cpu.shape() || gpu.dtype() != cpu.dtype() || gpu.device() != kGpu)
    return text(what, " is ", gpu.dtype(), gpu.shape(), " on ", gpu.device(), ", on the CPU ", cpu.dtype(),
                cpu.shape());
  const std::vector<double> g = gpu.to_vector(), c = cpu.to_vector(), x = exact.to_vector();
  double gpu_error = 0, cpu_error = 0, scale = 0;
  for (std::size_t i = 0; i < g.size(); ++i) {
    if (!std::isfinite(c[i]) || !std::isfinite(g[i])) {
      if (!(g[i] == c[i] || (std::isnan(g[i]) && std::isnan(c[i]))))
        return text(what, '[', i, "] is ", g[i], ", on the CPU ", c[i]);
      continue;
    }
    gpu_error += (g[i] - x[i]) * (g[i] - x[i]), cpu_error += (c[i] - x[i]) * (c[i] - x[i]), scale += x[i] * x[i];
  }
  const double allowed = steps * (2 * std::sqrt(cpu_error) + kRoundings * epsilon_of(type) * std::sqrt(scale));
  if (std::sqrt(gpu_error) > allowed)
    return text(what, ": error ", std::sqrt(gpu_error), ", allowed ", allowed, ", the CPU's ", std::sqrt(cpu_error));
  return "";
}

std::string judge_gpu(const OpCase& c, DType type, std::size_t turn) {
  std::vector<Laid> laid;
  std::vector<OnGpu> moved_in;
  std::vector<Tensor> cpu, exact, gpu;
  std::string layouts;
  for (std::size_t k = 0; k < c.inputs.size(); ++k) {
    const auto kinds = layouts_of(c.inputs[k].shape);
    Layout layout = kinds[(turn + k) % kinds.size()];
    if (c.traits.ties && repeated_axis(layout, c.inputs[k].shape) >= 0) layout = Layout::contiguous;
    laid.emplace_back(draw(c.inputs[k], 17 * k + turn + 1), layout, type);
    cpu.push_back(laid.back().tensor());
    exact.push_back(to(cpu.back(), DType::f64));
    gpu.push_back(moved_in.emplace_back(cpu.back()).tensor);
    layouts += text(' ', name_of(layout));
  }
  const Tensor dy_exact = random(between(-1, 1, c.op(cpu).shape()), 99, DType::f64);
  const Tensor dy = to(dy_exact, c.result(type)), gpu_dy = moved(dy, kGpu);
  const Played referee = play(c.op, exact, to(dy, DType::f64)), host = play(c.op, cpu, dy);
  const Played there = play(c.op, gpu, gpu_dy), again = play(c.op, gpu, gpu_dy);
  const std::string where = text(' ', c.label(), ' ', type, layouts);
  if (const std::string fault = compare("y", there.y, host.y, referee.y, c.result(type), c.traits.steps);
      !fault.empty())
    return fault + where;
  const auto same = [](const Tensor& a, const Tensor& b) { return bits(moved(a, {})) == bits(moved(b, {})); };
  if (!same(there.y, again.y)) return "y: other bits the second time" + where;
  for (std::size_t k = 0; k < gpu.size(); ++k) {
    const std::string what = text("gradient ", k);
    if (const std::string fault = compare(what, there.dx[k], host.dx[k], referee.dx[k], type, c.traits.steps);
        !fault.empty())
      return fault + where;
    if (!same(there.dx[k], again.dx[k])) return what + ": other bits the second time" + where;
    if (!moved_in[k].untouched()) return text("input ", k, " or its surroundings changed", where);
  }
  return "";
}

constexpr std::size_t kTurns = 8;  // layouts an input may have

}  // namespace

TEST_P(OpJudges, OnTheGpu) {
  if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
  int shown = 0;
  for (const OpCase& c : GetParam().cases())
    for (DType type : {DType::f32, DType::bf16, DType::f16})
      for (std::size_t turn = 0; turn < (c.traits.large ? 1 : kTurns) && shown < 8; ++turn) try {
          if (const std::string fault = judge_gpu(c, type, turn); !fault.empty()) ADD_FAILURE() << fault, ++shown;
        } catch (const Error& e) { ADD_FAILURE() << c.label() << ' ' << type << ": " << e.what(), ++shown; }
}

}  // namespace hilt::judge
