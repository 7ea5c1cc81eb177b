#pragma once
#include "../core/io/safetensors.h"

// Checkpoints: safetensors files in a directory. Each is either whole or not there at all.
//   NAME.tmp.RANDOM (new, 0600) -> data and checksums -> fsync -> rename -> fsync of the directory
//   -> the oldest are removed
// Beside those of steps there may be one of the best step, which none of them removes.

namespace [[gnu::visibility("default")]] hilt {

/// The right to write to a directory, while this object lives. The system releases it when the
/// process ends, in whatever way. A second one on the same directory throws Code::data.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory);  // of a directory that is there; throws Code::data
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  void check_there() const;  // throws Code::data where the directory was removed since, or another has its name

 private:
  std::string directory_;
  int descriptor_ = -1;
};

/// 64 bits over bytes that came in pieces: `so_far` is the result for those before, and any number
/// at the start. One changed word always shows; no match for who forges on purpose.
std::uint64_t checksum(std::uint64_t so_far, const void* data, std::size_t bytes);

inline constexpr const char* kBestCheckpoint = "best.safetensors";  // the file of the best step
std::string checkpoint_name(Index step);                            // "ckpt-000100.safetensors"
/// Steps of the checkpoints in a directory, ascending; none if there is no such directory.
std::vector<Index> checkpoint_steps(const std::string& directory);
/// Removes what killed writers left behind. Only the holder of the lock may call it.
void remove_unfinished_checkpoints(const std::string& directory);

/// Writes the checkpoint of `step` and then removes older ones, so that `keep`, at least 2, are
/// left. Equal items and metadata give equal files. If it throws, the directory is as before.
/// Metadata keys with a colon are reserved.
void save_checkpoint(const std::string& directory, Index step, std::span<const SafetensorsItem> items,
                     SafetensorsMetadata metadata, Index keep);
/// The same file under the name kBestCheckpoint, in place of the one that is there.
void save_best_checkpoint(const std::string& directory, Index step, std::span<const SafetensorsItem> items,
                          SafetensorsMetadata metadata);

/// One file of that format at any path, of step 0.
void write_checkpoint(const std::string& path, std::span<const SafetensorsItem> items, SafetensorsMetadata metadata);

/// An open checkpoint whose metadata match their checksum. If it is damaged, the error names the
/// newest whole one before it.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path);             // opens it; throws Code::data
  const std::string& path() const { return file_.path(); }  // as it was opened
  const SafetensorsFile& file() const& { return file_; }    // what lies below
  void file() && = delete;                                  // it would end with the statement: name the Checkpoint
  Index step() const { return step_; }                      // it was written at
  /// A metadata value; throws Code::data where there is none.
  const std::string& get(const std::string& key) const;
  std::uint64_t get_number(const std::string& key) const;  // the same as a number; throws Code::data where it is none
  Index get_index(const std::string& key) const;           // the same as a count
  /// Reads every tensor whose name begins with `prefix` into the item of that name: all of them and
  /// none more, of one shape and type, as they were written. Items change only if all is well.
  void read(std::span<SafetensorsItem> items, const std::string& prefix = "") const;

 private:
  SafetensorsFile file_;
  Index step_ = 0;
};

/// One line for each metadata key under `prefix` whose value differs from `expected`, as "key:
/// THEIRS in the checkpoint, OURS asked for"; keys that only one side has differ too.
std::vector<std::string> differences(const SafetensorsMetadata& metadata, const std::string& prefix,
                                     const SafetensorsMetadata& expected);

}  // namespace hilt
