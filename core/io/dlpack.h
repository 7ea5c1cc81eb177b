#pragma once
#include "../tensor.h"

namespace [[gnu::visibility("default")]] hilt {

/// DLPack 1.x: the C structs by which array libraries lend each other memory, declared here so that
/// dlpack.h is not needed; pointers between the two may be reinterpret_cast.
namespace dlpack {
struct DLPackVersion {         // of the protocol
  std::uint32_t major, minor;  // a new major is another layout
};
struct DLDevice {                       // where memory lies
  std::int32_t device_type, device_id;  // type: kCpu, kCuda or kCudaHost
};
struct DLDataType {         // what an element is
  std::uint8_t code, bits;  // code: kInt, kUInt, kFloat or kBfloat
  std::uint16_t lanes;      // of a vector type; 1
};
struct DLTensor {                 // a view of memory, on its own
  void* data;                     // of the device; the first element lies byte_offset behind
  DLDevice device;                // where data points
  std::int32_t ndim;              // axes
  DLDataType dtype;               // of an element
  std::int64_t *shape, *strides;  // strides in elements; null for a dense tensor
  std::uint64_t byte_offset;      // from data to the first element
};
struct DLManagedTensor {  // before 1.0
  DLTensor dl_tensor;
  void* manager_ctx;                  // the lender's
  void (*deleter)(DLManagedTensor*);  // ends the loan; may be null
};
struct DLManagedTensorVersioned {              // since 1.0: it says its version and may be read-only
  DLPackVersion version;                       // to be looked at before all else
  void* manager_ctx;                           // the lender's
  void (*deleter)(DLManagedTensorVersioned*);  // ends the loan; may be null
  std::uint64_t flags;                         // kReadOnly, or 0
  DLTensor dl_tensor;
};

inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;            // device_type
inline constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;  // code
inline constexpr std::uint64_t kReadOnly = 1;                                // of flags

/// Calls the deleter if nobody took the struct. To pass it on, into a capsule say, call release().
struct Release {
  template <class Managed> void operator()(Managed* m) const {  // ends the loan
    if (m->deleter) m->deleter(m);
  }
};
template <class Managed> using Owned = std::unique_ptr<Managed, Release>;  // a loan that ends by itself

enum class Access { read, write };  // what a consumer of to_dlpack() may do with the memory
}  // namespace dlpack

/// Lends x without a copy: its elements, shape and strides, and a share of its storage until the
/// deleter runs, on any thread. Write access counts as a write now: what a tape saved of x is
/// stale; writes that the consumer makes later are not seen.
dlpack::Owned<dlpack::DLManagedTensorVersioned> to_dlpack(const Tensor& x,
                                                          dlpack::Access access = dlpack::Access::read);
/// The form before 1.0. It cannot say read-only and so always gives write access.
dlpack::Owned<dlpack::DLManagedTensor> to_dlpack_legacy(const Tensor& x);

/// Takes what another library lends, without a copy unless it is read-only; the deleter runs when
/// the last tensor on it is gone. If this throws, the caller still owns m.
Tensor from_dlpack(dlpack::DLManagedTensorVersioned* m);
Tensor from_dlpack(dlpack::DLManagedTensor* m);

}  // namespace hilt
