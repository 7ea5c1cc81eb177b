// Tensors to and from DLPack's structs: memory is shared, but what is lent read-only is copied.
#include "core/io/dlpack.h"
#include <algorithm>
#include "core/config.h"

namespace hilt {
namespace {

using namespace dlpack;

constexpr DLPackVersion kVersionWritten{1, 1};

struct DlpackType {
  DType dtype;
  std::uint8_t code, bits;
};
constexpr DlpackType kDlpackTypes[] = {{DType::f64, kFloat, 64}, {DType::f32, kFloat, 32}, {DType::bf16, kBfloat, 16},
                                       {DType::f16, kFloat, 16}, {DType::i64, kInt, 64},   {DType::i32, kInt, 32},
                                       {DType::u8, kUInt, 8}};

/// What a consumer holds: the struct it knows, and behind it what the struct points to.
template <class Managed> struct Export {
  Managed managed{};
  Tensor tensor;
  std::array<Index, Shape::kMaxRank> shape{};
  Strides strides{};
};

template <class Managed> Owned<Managed> lend(const Tensor& x, Access access) {
  check(bool(x), "to_dlpack: undefined tensor");
  auto lent = std::make_unique<Export<Managed>>();
  lent->tensor = x;
  lent->strides = x.strides();
  std::copy(x.shape().begin(), x.shape().end(), lent->shape.begin());
  const auto* const type = std::ranges::find(kDlpackTypes, x.dtype(), &DlpackType::dtype);
  const std::byte* const elements = access == Access::write ? lent->tensor.mutable_raw() : lent->tensor.raw();
  DLTensor& t = lent->managed.dl_tensor;
  // The offset is in here: some consumers forget byte_offset.
  t.data = x.numel() == 0 ? nullptr : const_cast<std::byte*>(elements);
  t.device = x.device().is_cpu() ? DLDevice{kCpu, 0} : DLDevice{kCuda, x.device().index};
  t.ndim = x.rank();
  t.dtype = {type->code, type->bits, 1};
  t.shape = lent->shape.data();
  t.strides = lent->strides.data();
  lent->managed.manager_ctx = lent.get();
  lent->managed.deleter = [](Managed* m) { delete static_cast<Export<Managed>*>(m->manager_ctx); };
  return Owned<Managed>(&lent.release()->managed);
}

DType dtype_of_dlpack(const DLDataType& t) {
  for (const DlpackType& type : kDlpackTypes)
    if (t.code == type.code && t.bits == type.bits && t.lanes == 1) return type.dtype;
  fail("from_dlpack: elements of code ", int{t.code}, ", ", int{t.bits}, " bits, ", t.lanes,
       " lanes; expected f64 f32 bf16 f16 i64 i32 or u8, one lane");
}

Device device_of_dlpack(const DLDevice& d) {
  if (d.device_type == kCpu || d.device_type == kCudaHost) return {};
  check(d.device_type == kCuda, "from_dlpack: device type ", d.device_type,
        "; expected CPU (1), pinned CPU (3) or CUDA (2) memory; copy it to the CPU first");
  check(kHasCuda, "from_dlpack: memory of cuda:", d.device_id, ", built without CUDA; copy it to the CPU first");
  return {Device::Kind::cuda, d.device_id};
}

/// The elements of t, checked: all of it came from somebody else. release() ends the loan.
Tensor borrowed(const DLTensor& t, std::function<void()> release) {
  const DType dtype = dtype_of_dlpack(t.dtype);
  const Device device = device_of_dlpack(t.device);
  check(t.ndim >= 0 && t.ndim <= Shape::kMaxRank, "from_dlpack: ", t.ndim, " axes; expected 0..", Shape::kMaxRank);
  check(t.shape || t.ndim == 0, "from_dlpack: ", t.ndim, " axes and no shape");
  const Shape shape(std::span<const Index>(t.shape, static_cast<std::size_t>(t.ndim)));

  Strides strides = contiguous_strides(shape);
  Index last = 0;
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (shape.numel() == 0 || shape[axis] == 1) continue;  // never stepped along: any number may stand there
    Index& stride = strides[static_cast<std::size_t>(axis)];
    if (t.strides) stride = t.strides[axis];
    check(stride >= 0, "from_dlpack: stride ", stride, " of axis ", axis, " is negative; make a dense copy first");
    last = checked_add(last, checked_mul(shape[axis] - 1, stride, "from_dlpack"), "from_dlpack");
  }
  const Index bytes = shape.numel() == 0 ? 0
                                         : checked_mul(checked_add(last, 1, "from_dlpack"),
                                                       static_cast<Index>(size_of(dtype)), "from_dlpack");
  std::byte* data = nullptr;
  if (bytes > 0) {
    check(t.data, "from_dlpack: ", dtype, shape, " at a null pointer");
    std::uintptr_t first = 0, end = 0;
    check(!__builtin_add_overflow(reinterpret_cast<std::uintptr_t>(t.data), t.byte_offset, &first) &&
              !__builtin_add_overflow(first, static_cast<std::uintptr_t>(bytes), &end),
          "from_dlpack: ", bytes, " bytes at byte offset ", t.byte_offset, " reach beyond all memory");
    check(first % size_of(dtype) == 0, "from_dlpack: elements of ", dtype, " at an address that is not a multiple of ",
          size_of(dtype), "; make a copy first");
    data = static_cast<std::byte*>(t.data) + t.byte_offset;
  }
  return {Storage::borrow(data, static_cast<std::size_t>(bytes), device, std::move(release)), shape, strides, 0, dtype};
}

template <class Managed> Tensor take(Managed* m, bool read_only) {
  const auto release = [m] { Release{}(m); };
  if (!read_only) return borrowed(m->dl_tensor, release);
  const Tensor x = clone(borrowed(m->dl_tensor, nullptr));
  release();
  return x;
}

}  // namespace

Owned<DLManagedTensorVersioned> to_dlpack(const Tensor& x, Access access) {
  auto lent = lend<DLManagedTensorVersioned>(x, access);
  lent->version = kVersionWritten;
  lent->flags = access == Access::read ? kReadOnly : 0;
  return lent;
}
Owned<DLManagedTensor> to_dlpack_legacy(const Tensor& x) { return lend<DLManagedTensor>(x, Access::write); }

Tensor from_dlpack(DLManagedTensorVersioned* m) {
  check(m, "from_dlpack: null pointer");
  check(m->version.major == kVersionWritten.major, "from_dlpack: DLPack ", m->version.major, '.', m->version.minor,
        "; expected ", kVersionWritten.major, ".x");
  return take(m, m->flags & kReadOnly);
}
Tensor from_dlpack(DLManagedTensor* m) {
  check(m, "from_dlpack: null pointer");
  return take(m, false);
}

}  // namespace hilt
