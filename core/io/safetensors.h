#pragma once
#include <map>
#include "../tensor.h"

// The safetensors format, strictly:
//   byte 0  length N of the header, 8 bytes little endian, at most 16 MiB       8  N bytes of JSON, padded with blanks
//   then    the tensors, dense and little endian, one after the other to the end of the file: no holes, no overlap
// Nothing in a file is trusted and nothing in it runs: each number is checked, and every size
// against the length of the file, before memory is asked for. Errors have Code::data and read `WHAT
// (value): why, FILE:OFFSET; what to try`.

namespace [[gnu::visibility("default")]] hilt {

class Descriptor;  // private

struct SafetensorsEntry {  // one tensor of a file; its bytes are [begin, end) of the file
  std::string name{};      // any UTF-8 text
  DType dtype = DType::f32;
  Shape shape{};
  std::uint64_t begin = 0, end = 0;  // offsets in the file
};
using SafetensorsMetadata = std::map<std::string, std::string>;  // free text by key, sorted

/// An open, scanned file. Tensors are read when asked for, with pread: the file is never mapped.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);  // opens and scans it; throws Code::data

  const std::string& path() const { return path_; }  // as it was opened
  /// Sorted by name.
  const std::vector<SafetensorsEntry>& entries() const& { return entries_; }
  const SafetensorsMetadata& metadata() const& { return metadata_; }  // what stands under "__metadata__"
  void entries() && = delete;                                    // they would end with the statement: name the file
  void metadata() && = delete;                                   // the same
  void find(const std::string&) && = delete;                     // the same
  std::uint64_t bytes() const { return bytes_; }                 // length of the file
  const SafetensorsEntry* find(const std::string& name) const&;  // null where there is none
  /// A new tensor; an unknown name is an error that proposes the nearest.
  Tensor read(const std::string& name) const;

 private:
  std::string path_;
  std::shared_ptr<Descriptor> file_;
  std::uint64_t bytes_ = 0;
  std::vector<SafetensorsEntry> entries_;
  SafetensorsMetadata metadata_;
};

/// What is to be written. Names are free but for "__metadata__" and must differ.
struct SafetensorsItem {
  std::string name{};  // not "__metadata__"
  Tensor tensor{};
};
/// The file up to the tensors', which follow by name: a pure function of names, types and metadata.
std::string safetensors_header(std::span<const SafetensorsItem> items, const SafetensorsMetadata& metadata = {});
/// Writes a file, whole or not at all, for its owner alone: equal input, equal bytes. Where it
/// cannot it throws Code::data, and what was there stays.
void write_safetensors(const std::string& path, std::span<const SafetensorsItem> items,
                       const SafetensorsMetadata& metadata = {});

}  // namespace hilt
