// Writing, listing, locking and reading checkpoints. All tensors and metadata carry a checksum.
#include "nn/checkpoint.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include "core/io/text.h"

namespace hilt {

// Every step is invertible in `h` and in the word, so one changed word always changes the result.
std::uint64_t checksum(std::uint64_t h, const void* data, std::size_t bytes) {
  const auto mix = [&h](std::uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  };
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t word = 0;
  for (; bytes >= sizeof word; at += sizeof word, bytes -= sizeof word) {
    std::memcpy(&word, at, sizeof word);
    mix(word);
  }
  word = bytes;
  for (std::size_t i = 0; i < bytes; ++i) word = word << 8 | at[i];
  mix(word);
  return h;
}

namespace {

constexpr const char* kFormat = "hilt-checkpoint";
constexpr int kMetadataVersion = 1;  // of what the metadata mean
constexpr const char* kOverMetadata = "checksum:";

std::string hex(std::uint64_t x) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, x);
  return text;
}

std::string checksum_of(const Tensor& x) {
  const Tensor d = moved(dense(x), {});
  return hex(checksum(1, d.raw(), d.bytes()));
}

/// Over all metadata but itself; it covers the tensors too, through their own.
std::string checksum_of(const SafetensorsMetadata& metadata) {
  std::uint64_t h = 2;
  for (const auto& [key, value] : metadata)
    if (key != kOverMetadata) h = checksum(checksum(h, key.data(), key.size()), value.data(), value.size());
  return hex(h);
}

std::optional<Index> step_of(std::string_view name) {
  const auto step = number_in<Index>(cut_text(cut_text(name, '-').second, '.').first);
  return step && *step >= 0 && checkpoint_name(*step) == name ? step : std::nullopt;
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  // std::filesystem's iterators end the process where memory runs out.
  const std::unique_ptr<DIR, int (*)(DIR*)> d(::opendir(directory.c_str()), ::closedir);
  while (const dirent* entry = d ? ::readdir(d.get()) : nullptr) names.emplace_back(entry->d_name);
  return names;
}

}  // namespace

// ---- the directory ------------------------------------------------------------------------------
DirectoryLock::DirectoryLock(const std::string& directory)
    : directory_(directory), descriptor_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (descriptor_ < 0)
    fail_with(Code::data, directory, ": cannot open: ", std::strerror(errno), "; name a directory you may write to");
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  ::close(descriptor_);
  fail_with(Code::data, directory, ": ",
            error == EWOULDBLOCK ? "another program writes to this directory; wait for it or name another directory"
                                 : std::string("cannot lock: ") + std::strerror(error));
}

DirectoryLock::~DirectoryLock() { ::close(descriptor_); }

void DirectoryLock::check_there() const {
  struct stat held, named;
  if (::fstat(descriptor_, &held) != 0 || ::stat(directory_.c_str(), &named) != 0)
    fail_with(Code::data, directory_, ": cannot write: ", std::strerror(errno));
  if (held.st_dev != named.st_dev || held.st_ino != named.st_ino)
    fail_with(Code::data, directory_, ": cannot write: another directory has taken its name");
}

std::string checkpoint_name(Index step) {
  char text[64];
  std::snprintf(text, sizeof text, "ckpt-%06" PRId64 ".safetensors", step);
  return text;
}

std::vector<Index> checkpoint_steps(const std::string& directory) {
  std::vector<Index> steps;
  for (const std::string& name : names_in(directory))
    if (const auto step = step_of(name)) steps.push_back(*step);
  std::ranges::sort(steps);
  return steps;
}

void remove_unfinished_checkpoints(const std::string& directory) {
  for (const std::string& name : names_in(directory))
    if (name.find(".tmp.") != name.npos && (name.starts_with("ckpt-") || name.starts_with("best.")))
      ::unlink((directory + '/' + name).c_str());
}

// ---- writing ------------------------------------------------------------------------------------
static void write_checkpoint(const std::string& path, Index step, std::span<const SafetensorsItem> items,
                             SafetensorsMetadata metadata) {
  metadata["format"] = kFormat;
  metadata["format_version"] = std::to_string(kMetadataVersion);
  metadata["step"] = std::to_string(step);
  for (const SafetensorsItem& item : items) metadata["checksum:" + item.name] = checksum_of(item.tensor);
  metadata[kOverMetadata] = checksum_of(metadata);
  write_safetensors(path, items, metadata);
}

void save_checkpoint(const std::string& directory, Index step, std::span<const SafetensorsItem> items,
                     SafetensorsMetadata metadata, Index keep) {
  // What is to go afterwards is known before: once the new one is there, nothing may throw.
  std::vector<Index> steps = checkpoint_steps(directory);
  if (!std::ranges::binary_search(steps, step)) steps.insert(std::ranges::upper_bound(steps, step), step);
  const auto kept = static_cast<std::size_t>(std::max<Index>(keep, 2));
  std::vector<std::string> old;
  for (std::size_t i = 0; i + kept < steps.size(); ++i)
    if (steps[i] != step) old.push_back(directory + '/' + checkpoint_name(steps[i]));
  write_checkpoint(directory + '/' + checkpoint_name(step), step, items, std::move(metadata));
  for (const std::string& name : old) ::unlink(name.c_str());
}

void save_best_checkpoint(const std::string& directory, Index step, std::span<const SafetensorsItem> items,
                          SafetensorsMetadata metadata) {
  write_checkpoint(directory + '/' + kBestCheckpoint, step, items, std::move(metadata));
}

void write_checkpoint(const std::string& path, std::span<const SafetensorsItem> items, SafetensorsMetadata metadata) {
  write_checkpoint(path, 0, items, std::move(metadata));
}

// ---- reading ------------------------------------------------------------------------------------
static bool says(const SafetensorsFile& file, const std::string& key, const std::string& value) {
  const auto found = file.metadata().find(key);
  return found != file.metadata().end() && found->second == value;
}
static bool metadata_match(const SafetensorsFile& file) {
  return says(file, kOverMetadata, checksum_of(file.metadata()));
}

static bool is_whole(const std::string& path) try {
  const SafetensorsFile file(path);
  return metadata_match(file) && std::ranges::all_of(file.entries(), [&](const SafetensorsEntry& entry) {
           return says(file, "checksum:" + entry.name, checksum_of(file.read(entry.name)));
         });
} catch (const Error&) { return false; }

/// What is wrong with a checkpoint, and as what to try the newest whole one before it, if any.
static std::string with_way_out(const std::string& path, const std::string& what) {
  const std::size_t slash = path.rfind('/');
  const std::string directory = slash == path.npos ? "." : path.substr(0, slash);
  const std::string_view name = std::string_view(path).substr(slash == path.npos ? 0 : slash + 1);
  const std::optional<Index> step = step_of(name);
  std::vector<Index> steps = checkpoint_steps(directory);
  if (step ? !std::ranges::binary_search(steps, *step) : name != kBestCheckpoint) return what;
  std::erase_if(steps, [&](Index s) { return step && s >= *step; });
  const auto whole = std::find_if(steps.rbegin(), steps.rend(),
                                  [&](Index s) { return is_whole(directory + '/' + checkpoint_name(s)); });
  if (whole == steps.rend()) return what;
  return what.substr(0, what.rfind("; ")) + "; " + checkpoint_name(*whole) +
         " beside it is whole: to go on from there, move " + path + " away and resume";
}

[[noreturn]] static void damaged(const std::string& path, const std::string& what) {
  fail_with(Code::data, with_way_out(path, path + ": damaged: " + what + "; use an earlier checkpoint"));
}

SafetensorsFile opened(const std::string& path) try { return SafetensorsFile(path); } catch (const Error& e) {
  fail_with(e.code(), e.code() == Code::data ? with_way_out(path, e.what()) : e.what());
}

Checkpoint::Checkpoint(const std::string& path) : file_(opened(path)) {
  if (!says(file_, "format", kFormat))
    fail_with(Code::data, path, ": not a checkpoint: it holds tensors, but not what training needs to go on");
  const std::uint64_t version = get_number("format_version");
  if (version > kMetadataVersion)
    fail_with(Code::data, path, ": format ", version, ", this program knows up to ", kMetadataVersion,
              "; use a newer one");
  (void)get(kOverMetadata);
  if (!metadata_match(file_)) damaged(path, "its metadata do not match their checksum");
  step_ = get_index("step");
}

const std::string& Checkpoint::get(const std::string& key) const {
  const auto found = file_.metadata().find(key);
  if (found == file_.metadata().end()) fail_with(Code::data, path(), ": its metadata lack '", key, "'");
  return found->second;
}

std::uint64_t Checkpoint::get_number(const std::string& key) const {
  const std::string& text = get(key);
  if (const std::optional<std::uint64_t> value = number_in<std::uint64_t>(text)) return *value;
  fail_with(Code::data, path(), ": metadata '", key, "' should be a whole number, is '", text.substr(0, 40), "'");
}

Index Checkpoint::get_index(const std::string& key) const {
  const std::uint64_t value = get_number(key);
  if (value > static_cast<std::uint64_t>(std::numeric_limits<Index>::max() / 2))  // what comes next has a number too
    fail_with(Code::data, path(), ": metadata '", key, "' is ", value, ", more than anything is counted to");
  return static_cast<Index>(value);
}

void Checkpoint::read(std::span<SafetensorsItem> items, const std::string& prefix) const {
  std::vector<std::string> names;
  for (const SafetensorsItem& item : items) {
    names.push_back(item.name);
    const SafetensorsEntry* const entry = file_.find(item.name);
    if (!entry)
      fail_with(Code::data, path(), ": lacks the tensor ", item.name, ' ', item.tensor.dtype(), item.tensor.shape());
    if (entry->shape != item.tensor.shape() || entry->dtype != item.tensor.dtype())
      fail_with(Code::data, path(), ": tensor ", item.name, " is ", entry->dtype, entry->shape, ", expected ",
                item.tensor.dtype(), item.tensor.shape());
  }
  std::ranges::sort(names);
  for (const SafetensorsEntry& entry : file_.entries())
    if (entry.name.starts_with(prefix) && !std::ranges::binary_search(names, entry.name))
      fail_with(Code::data, path(), ": holds a tensor that this model has not: ", entry.name, ' ', entry.dtype,
                entry.shape);
  std::vector<Tensor> read;
  for (const SafetensorsItem& item : items) {
    read.push_back(file_.read(item.name));
    const SafetensorsEntry& entry = *file_.find(item.name);
    if (checksum_of(read.back()) != get("checksum:" + item.name))
      damaged(path(), "tensor " + item.name + ", bytes " + std::to_string(entry.begin) + ".." +
                          std::to_string(entry.end) + ", does not match its checksum");
  }
  for (std::size_t i = 0; i < items.size(); ++i) copy(items[i].tensor, read[i]);
}

std::vector<std::string> differences(const SafetensorsMetadata& metadata, const std::string& prefix,
                                     const SafetensorsMetadata& expected) {
  std::vector<std::string> out;
  for (const auto& [key, ours] : expected) {
    const auto theirs = metadata.find(prefix + key);
    if (theirs == metadata.end()) out.push_back(key + ": unknown to the checkpoint, " + ours + " asked for");
    else if (theirs->second != ours)
      out.push_back(key + ": " + theirs->second + " in the checkpoint, " + ours + " asked for");
  }
  for (const auto& [key, theirs] : metadata)
    if (key.starts_with(prefix) && !expected.contains(key.substr(prefix.size())))
      out.push_back(key.substr(prefix.size()) + ": " + theirs + " in the checkpoint, unknown here");
  return out;
}

}  // namespace hilt
