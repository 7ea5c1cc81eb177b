// Making, viewing, copying and printing tensors; every view is checked to lie inside its storage.
#include "core/tensor.h"
#include <cstring>
#include <iomanip>
#include "core/cuda/context.h"
#include "core/cuda/kernels.h"
#include "core/dispatch.h"
#include "core/strided.h"

namespace hilt {
namespace kernels {  // tensor_cpu.cpp
template <class T, class At> void narrow(At, Index n, const float* from, T* to);
template <class T, class At> void widen(At, Index n, const T* from, float* to);
}  // namespace kernels

static TensorId next_id() {
  static std::atomic<TensorId> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Elements a parallel piece moves: large enough to outweigh handing it to a thread.
constexpr Index kPiece = 1 << 16;
template <class T> constexpr bool kIsHalf = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

static void check_holds(const Storage& storage, DType dtype, const Shape& shape, Index offset, Index end) {
  check(bool(storage), "Tensor: undefined storage");
  check((reinterpret_cast<std::uintptr_t>(storage.data()) & (size_of(dtype) - 1)) == 0,
        "Tensor: memory at an address that is no multiple of ", size_of(dtype), " cannot hold ", dtype);
  const auto elements = static_cast<Index>(storage.bytes() >> std::countr_zero(size_of(dtype)));
  check(offset >= 0 && end <= elements, "Tensor: ", dtype, shape, " from element ", offset,
        " on reaches beyond its storage of ", elements, " elements");
}

// Dense: no axis has to be asked where it ends.
Tensor::Tensor(Storage storage, const Shape& shape, DType dtype)
    : storage_(std::move(storage)), shape_(shape), strides_(contiguous_strides(shape)), id_(next_id()), dtype_(dtype) {
  check_holds(storage_, dtype, shape, 0, shape.numel());
}

Tensor::Tensor(Storage storage, const Shape& shape, const Strides& strides, Index offset, DType dtype)
    : storage_(std::move(storage)), shape_(shape), strides_(strides), offset_(offset), id_(next_id()), dtype_(dtype) {
  Index last = offset;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank()); ++i) {
    check(strides_[i] >= 0, "Tensor: stride ", strides_[i], " of axis ", i, " is negative");
    const Index n = shape_.begin()[i];
    if (n > 0) last = checked_add(last, checked_mul(n - 1, strides_[i], "Tensor"), "Tensor");
  }
  check_holds(storage_, dtype, shape, offset, shape.numel() == 0 ? offset : checked_add(last, 1, "Tensor"));
}

bool Tensor::is_contiguous() const {
  Index step = 1;
  for (auto i = static_cast<std::size_t>(rank()); i-- > 0; step *= shape_.begin()[i])
    if (strides_[i] != step && shape_.begin()[i] != 1 && numel() > 0) return false;
  return true;
}

double Tensor::item() const {
  check(bool(*this), "item: undefined tensor");
  check(numel() == 1, "item: needs one element, got shape ", shape_);
  return to_vector<double>()[0];
}

template <class T> std::vector<T> Tensor::to_vector() const {
  require_defined();
  std::vector<T> out(static_cast<std::size_t>(numel()));
  if (numel() == 0) return out;
  Tensor view = borrow(std::span(out), shape_);
  copy(view, *this);
  return out;
}

Tensor empty(const Shape& shape, DType dtype, Device device) {
  const Index bytes = checked_mul(shape.numel(), static_cast<Index>(size_of(dtype)), "empty");
  return Tensor(Storage::allocate(static_cast<std::size_t>(bytes), device), shape, dtype);
}

Tensor full(const Shape& shape, double value, DType dtype, Device device) {
  Tensor t = empty(shape, dtype, device);
  if (value != 0 || std::signbit(value)) kernels::generate("full", t, kernels::Constant{value});
  else if (device.is_cpu())  // all bits 0, which the C library is fastest at
    parallel_for(static_cast<Index>(t.bytes()), kPiece, [to = t.mutable_raw()](Index begin, Index end) {
      std::memset(to + begin, 0, static_cast<std::size_t>(end - begin));
    });
  else if constexpr (kHasCuda) cuda::clear(cuda_of(device), t.mutable_raw(), t.bytes());
  return t;
}

Tensor arange(Index n, DType dtype, Device device) {
  Tensor t = empty({n}, dtype, device);
  kernels::generate("arange", t, kernels::Count{});
  return t;
}

template <class T> Tensor from_values(std::span<const T> values, const Shape& shape, DType dtype) {
  check(std::ssize(values) == shape.numel(), "from_values: ", values.size(), " values for a shape ", shape);
  Tensor t = empty(shape, dtype);
  if (t.numel() > 0) copy(t, borrow(values, shape));
  return t;
}
#define HILT_OF_VALUES(T)                               \
  template std::vector<T> Tensor::to_vector<T>() const; \
  template Tensor from_values(std::span<const T>, const Shape&, DType);
HILT_OF_VALUES(double)
HILT_OF_VALUES(float)
HILT_OF_VALUES(std::int64_t)
HILT_OF_VALUES(std::int32_t)
HILT_OF_VALUES(std::uint8_t)

/// Where one side is a GPU. Between devices go dense bytes of one type; all else stays on a device.
[[maybe_unused]] static void copy_with_gpu(Tensor& dst, const Tensor& src) {
  if constexpr (kHasCuda) {  // without it nothing here may be linked, optimized or not
    if (dst.device() == src.device())
      return kernels::copy_elements(cuda_of(dst.device()), dst.mutable_raw(), dst.dtype(), src.raw(), src.dtype(),
                                    {src.shape(), {dst.strides(), src.strides()}});
    if (dst.device().is_cuda() && src.device().is_cuda()) return copy(dst, moved(src, {}));
    if (!src.is_contiguous()) return copy(dst, clone(src));
    if (!dst.is_contiguous() || dst.dtype() != src.dtype()) return copy(dst, moved(src, dst.device()));
    if (dst.device().is_cuda()) cuda::to_device(cuda_of(dst.device()), dst.mutable_raw(), src.raw(), src.bytes());
    else cuda::to_host(cuda_of(src.device()), dst.mutable_raw(), src.raw(), src.bytes());
  }
}

void copy(Tensor& dst, const Tensor& src) {
  check(dst.shape() == src.shape(), "copy: ", src.shape(), " into ", dst.shape());
  for (int axis = 0; axis < dst.rank(); ++axis)
    check(dst.stride(axis) > 0 || dst.dim(axis) < 2, "copy: into ", dst.shape(), ", whose axis ", axis,
          " repeats one element (expand); copy into what was expanded, or into a clone");
  if constexpr (kHasCuda)
    if (dst.device().is_cuda() || src.device().is_cuda()) return copy_with_gpu(dst, src);
  const Runs<2> runs(src.shape(), {dst.strides(), src.strides()});
  visit_any("copy", dst, [&]<class To>(Cpu) {
    To* const out = dst.mutable_data<To>();
    visit_any("copy", src, [&]<class From>(Cpu) {
      const From* const in = src.data<From>();
      runs.for_pieces(kPiece, [&](const auto& at, Index n) {
        To* const to = out + at[0];
        const From* const from = in + at[1];
        if (runs.step[0] != 1 || runs.step[1] != 1)
          for (Index i = 0; i < n; ++i) to[i * runs.step[0]] = convert<To>(from[i * runs.step[1]]);
        else if constexpr (std::is_same_v<To, From>)
          std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(n) * sizeof(To));
        else if constexpr (std::is_same_v<From, float> && kIsHalf<To>)
          detail::with_isa([&](auto where) { kernels::narrow(where, n, from, to); });
        else if constexpr (std::is_same_v<To, float> && kIsHalf<From>)
          detail::with_isa([&](auto where) { kernels::widen(where, n, from, to); });
        else
          for (Index i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
      });
    });
  });
}

static Tensor copied(const Tensor& x, DType dtype, Device device) {
  Tensor y = empty(x.shape(), dtype, device);
  copy(y, x);
  return y;
}
Tensor converted(const Tensor& x, DType dtype) { return copied(x, dtype, x.device()); }
Tensor clone(const Tensor& x) { return converted(x, x.dtype()); }
Tensor moved(const Tensor& x, Device device) { return x.device() == device ? x : copied(x, x.dtype(), device); }
Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : clone(x); }

Tensor as_strided(const Tensor& x, const Shape& shape, const Strides& strides, Index offset) {
  return Tensor(x.storage(), shape, strides, offset, x.dtype());
}

Tensor broadcast_to(const char* op, const Tensor& x, const Shape& shape) {
  check(broadcast(op, x.shape(), shape) == shape, op, ": cannot repeat ", x.shape(), " to ", shape);
  Strides strides{};
  for (int i = 1; i <= x.rank(); ++i)
    if (x.dim(-i) != 1) strides[static_cast<std::size_t>(shape.rank() - i)] = x.stride(-i);
  return as_strided(x, shape, strides, x.offset());
}

// ---- printing -----------------------------------------------------------------------------------
constexpr Index kWhole = 1000, kEnds = 3;  // print everything up to kWhole elements, else kEnds at each end of an axis

static void print_axis(std::ostream& os, const Tensor& x, int axis, Index at) {
  if (axis == x.rank()) {
    visit_any("to_string", x, [&]<class T>(Cpu) {
      const T v = (reinterpret_cast<const T*>(x.storage().data()))[at];
      if constexpr (std::is_integral_v<T>) os << +v;  // a byte is no character
      else os << static_cast<double>(v);
    });
    return;
  }
  os << '[';
  const Index n = x.dim(axis);
  for (Index i = 0; i < n; ++i) {
    if (i > 0) os << (axis + 1 == x.rank() ? ", " : ",\n" + std::string(static_cast<std::size_t>(axis) + 1, ' '));
    if (x.numel() > kWhole && n > 2 * kEnds && i == kEnds) {
      os << "..";
      i = n - kEnds - 1;
      continue;
    }
    print_axis(os, x, axis + 1, at + i * x.stride(axis));
  }
  os << ']';
}

std::ostream& operator<<(std::ostream& os, const Tensor& x) {
  if (!x) return os << "undefined";
  TextStream text;
  text << std::setprecision(x.dtype() == DType::f64 ? 8 : 6);
  const Tensor here = moved(x, {});
  print_axis(text, here, 0, here.offset());
  text << ' ' << x.dtype() << x.shape();
  return os << text.str();  // as a string: the flags of os are its owner's
}
std::string to_string(const Tensor& x) { return (TextStream() << x).str(); }

// An op may hand one tensor to two inputs (add returns {dy, dy}), or a view of what it keeps.
void accumulate(Tensor& sum, const Tensor& more) {
  check(sum.shape() == more.shape() && sum.dtype() == more.dtype(), "accumulate: ", more.dtype(), more.shape(),
        " does not add to ", sum.dtype(), sum.shape());
  const Tensor a = sum.is_contiguous() ? std::move(sum) : clone(sum);
  const Tensor b = dense(more);
  sum = a.storage().is_sole_owner() ? a : empty_like(a);
  visit("accumulate", a, [&]<class T>(auto where) {
    const T *x = a.data<T>(), *y = b.data<T>();
    T* const out = sum.mutable_data<T>();
    const auto add = [=](Index i, Index end) { kernels::accumulate(where, x + i, y + i, out + i, end - i); };
    is_cuda<decltype(where)> ? add(0, a.numel()) : parallel_for(a.numel(), kPiece, add);
  });
}

}  // namespace hilt
