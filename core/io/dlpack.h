#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include "../tensor.h"

namespace [[gnu::visibility("default")]] hilt {

/// DLPack 1.x, the C structs by which array libraries lend each other memory. Declared here so that
/// dlpack.h is not needed; a program that has it reinterpret_casts pointers between the two, whose
/// layouts are one.
namespace dlpack {
struct DLPackVersion {
  std::uint32_t major, minor;
};
struct DLDevice {
  std::int32_t device_type, device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t *shape, *strides;  // strides in elements; null for a dense tensor
  std::uint64_t byte_offset;
};
struct DLManagedTensor {  // before 1.0
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;            // device_type
inline constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;  // code
inline constexpr std::uint64_t kReadOnly = 1;                                // of flags

static_assert(sizeof(void*) == 8 && sizeof(DLDevice) == 8 && sizeof(DLDataType) == 4);
static_assert(std::is_standard_layout_v<DLManagedTensor> && std::is_standard_layout_v<DLManagedTensorVersioned>);
static_assert(offsetof(DLTensor, data) == 0 && offsetof(DLTensor, device) == 8 && offsetof(DLTensor, ndim) == 16 &&
              offsetof(DLTensor, dtype) == 20 && offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 &&
              offsetof(DLTensor, byte_offset) == 40 && sizeof(DLTensor) == 48);
static_assert(offsetof(DLManagedTensor, manager_ctx) == 48 && offsetof(DLManagedTensor, deleter) == 56 &&
              sizeof(DLManagedTensor) == 64);
static_assert(offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
              offsetof(DLManagedTensorVersioned, deleter) == 16 && offsetof(DLManagedTensorVersioned, flags) == 24 &&
              offsetof(DLManagedTensorVersioned, dl_tensor) == 32 && sizeof(DLManagedTensorVersioned) == 80);

/// Calls the deleter of what nobody took. Who hands the pointer on, into a Python capsule say,
/// release()s it.
struct Release {
  template <class Managed> void operator()(Managed* m) const {
    if (m->deleter) m->deleter(m);
  }
};
template <class Managed> using Owned = std::unique_ptr<Managed, Release>;

/// What a consumer of to_dlpack() may do with the memory.
enum class Access { read, write };
}  // namespace dlpack

/// Lends x, no copy: its elements, shape and strides, and a share of its storage until the deleter
/// runs, on any thread. Marked read-only unless write access is given, which counts as a write now:
/// what a tape saved of x is stale from then on. Writes that the consumer makes later go unseen.
dlpack::Owned<dlpack::DLManagedTensorVersioned> to_dlpack(const Tensor& x,
                                                          dlpack::Access access = dlpack::Access::read);
/// The form before 1.0. It cannot say read-only and so always gives write access.
dlpack::Owned<dlpack::DLManagedTensor> to_dlpack_legacy(const Tensor& x);

/// Takes what another library lends: no copy, and the deleter runs once the last tensor on it is
/// gone. What is marked read-only is copied and released at once, because a Tensor can be written
/// to. If this throws, m is still the caller's.
Tensor from_dlpack(dlpack::DLManagedTensorVersioned* m);
Tensor from_dlpack(dlpack::DLManagedTensor* m);

}  // namespace hilt
