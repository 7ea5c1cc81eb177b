#pragma once
#include "dtype.h"
#include "shape.h"
#include "storage.h"

namespace [[gnu::visibility("default")]] hilt {

using TensorId = std::uint64_t;  // 0 is the undefined tensor

/// A value: shape, strides, type and a share of a Storage. Copying shares the data and keeps the
/// id. A Tensor knows nothing of gradients; a Tape knows tensors by their id.
class Tensor {
 public:
  Tensor() = default;
  /// A fresh id on `storage`: dense in row-major order, or by strides from element `offset` on.
  Tensor(Storage storage, const Shape& shape, DType dtype);
  Tensor(Storage storage, const Shape& shape, const Strides& strides, Index offset, DType dtype);

  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }                  // how many axes
  Index dim(int axis) const { return shape_[axis]; }          // extent; a negative axis counts from the end
  Index numel() const { return *this ? shape_.numel() : 0; }  // how many elements; 0 if undefined
  DType dtype() const { return dtype_; }
  Device device() const { return require_defined(), storage_.device(); }
  TensorId id() const { return *this ? id_ : 0; }  // the same for copies; 0 if undefined
  const Storage& storage() const { return storage_; }
  const Strides& strides() const { return strides_; }
  /// In elements; a negative axis counts from the end.
  Index stride(int axis) const { return strides_[shape_.place(axis)]; }
  Index offset() const { return offset_; }  // of the first element in the storage
  bool is_contiguous() const;               // elements lie one after the other in row-major order
  /// Bytes of the elements, not of the storage behind them.
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype_); }
  explicit operator bool() const { return bool(storage_); }
  /// x[i] is select(x, 0, i), an op: include ops.h.
  template <std::integral I> Tensor operator[](I i) const { return select(*this, 0, i); }

  template <class T> const T* data() const {  // the first element; the others lie where strides() say
    require(dtype_of<T>);
    return reinterpret_cast<const T*>(storage_.data()) + offset_;
  }
  /// The same for writing. Marks the storage as changed, which invalidates what a tape saved of it.
  template <class T> T* mutable_data() {
    require(dtype_of<T>);
    return reinterpret_cast<T*>(storage_.mutable_data()) + offset_;
  }
  const std::byte* raw() const {  // the first element, whatever its type; throws Code::usage if undefined
    return require_defined(), storage_.data() + static_cast<std::size_t>(offset_) * size_of(dtype_);
  }
  std::byte* mutable_raw() {  // the same for writing, as mutable_data()
    return require_defined(), storage_.mutable_data() + static_cast<std::size_t>(offset_) * size_of(dtype_);
  }

  double item() const;                                           // the only element, converted
  template <class T = double> std::vector<T> to_vector() const;  // all elements in row-major order, converted

 private:
  void require(DType asked) const {
    check(dtype_ == asked && *this, "Tensor: asked for ", asked, " data of ",
          *this ? "a tensor of type " : "an undefined tensor, type ", dtype_);
  }
  void require_defined() const {
    check(bool(*this), "Tensor: this one is undefined: it was never given a value, or was moved from");
  }
  Storage storage_;
  Shape shape_;
  Strides strides_{};
  Index offset_ = 0;
  TensorId id_ = 0;
  DType dtype_ = DType::f32;
};

/// A piece of a model: any number of ops, from inputs to one output.
using Composite = std::function<Tensor(std::span<const Tensor>)>;

// ---- making tensors -----------------------------------------------------------------------------
/// Not initialized. Throws Code::memory, as do all that make a tensor.
Tensor empty(const Shape& shape, DType dtype = DType::f32, Device device = {});
/// Every element is `value`.
Tensor full(const Shape& shape, double value, DType dtype = DType::f32, Device device = {});
inline Tensor zeros(const Shape& shape, DType dtype = DType::f32, Device device = {}) {  // every element is 0
  return full(shape, 0, dtype, device);
}
inline Tensor ones(const Shape& shape, DType dtype = DType::f32, Device device = {}) {  // every element is 1
  return full(shape, 1, dtype, device);
}
/// 0, 1, .. n-1.
Tensor arange(Index n, DType dtype = DType::i64, Device device = {});
/// values in row-major order, stored as T's type unless another is named.
template <class T>
[[gnu::visibility("default")]] Tensor from_values(std::span<const T> values, const Shape& shape,
                                                  DType dtype = dtype_of<T>);
template <class T> Tensor from_values(const std::vector<T>& values, const Shape& shape, DType dtype = dtype_of<T>) {
  return from_values(std::span<const T>(values), shape, dtype);
}
template <class T> Tensor from_values(std::initializer_list<T> values, const Shape& shape, DType dtype = dtype_of<T>) {
  return from_values(std::span<const T>(values.begin(), values.size()), shape, dtype);
}
/// Lies in memory of the program, which must stay there until the last tensor on it is gone and
/// `release` runs. Constant memory is for reading alone: a write throws Code::usage.
template <class T, std::size_t N>
Tensor borrow(std::span<T, N> memory, const Shape& shape, std::function<void()> release = nullptr) {
  using Element = std::remove_const_t<T>;
  check(std::ssize(memory) == shape.numel(), "borrow: ", memory.size(), " values for a shape ", shape);
  return {Storage::borrow(const_cast<Element*>(memory.data()), memory.size_bytes(), {}, std::move(release),
                          std::is_const_v<T>),
          shape, dtype_of<Element>};
}
/// Not initialized; shape, type and device of x.
inline Tensor empty_like(const Tensor& x) { return empty(x.shape(), x.dtype(), x.device()); }
/// 0 in the shape, type and device of x.
inline Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), x.dtype(), x.device()); }
/// A scalar c in the type and on the device of x; the type must have such a number.
inline Tensor scalar_like(const Tensor& x, double c) {
  check(is_floating(x.dtype()) || full({}, c, x.dtype()).item() == c, "scalar_like: ", c, " is no ", x.dtype(),
        "; convert the tensor with to()");
  return full({}, c, x.dtype(), x.device());
}

// ---- below the tape: no gradient flows through these. ops.h has the differentiable ones ---------
/// dst[i] = src[i], converting type (floats round to nearest even, floats to integers truncate).
void copy(Tensor& dst, const Tensor& src);
Tensor moved(const Tensor& x, Device device);    // x itself if it is there, else a dense copy on that device
Tensor clone(const Tensor& x);                   // a dense copy
Tensor converted(const Tensor& x, DType dtype);  // the same in another type
Tensor dense(const Tensor& x);                   // x itself when dense, else a dense copy
/// A window on x's storage, checked to lie inside it.
Tensor as_strided(const Tensor& x, const Shape& shape, const Strides& strides, Index offset);
/// sum = sum + more, in sum's own memory where nobody else can see it: all that a tape adds up.
void accumulate(Tensor& sum, const Tensor& more);
/// x repeated along axes of extent 1 (and new leading axes) by strides of zero.
Tensor broadcast_to(const char* op, const Tensor& x, const Shape& shape);

std::string to_string(const Tensor& x);  // nested brackets; long axes are cut to their ends
std::ostream& operator<<(std::ostream& os, const Tensor& x);

}  // namespace hilt
