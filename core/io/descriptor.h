#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include "core/error.h"

// Private: files as the system numbers them.

namespace hilt {

class Descriptor {  // one of them, which closes itself
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept { return std::swap(number_, other.number_), *this; }
  ~Descriptor() { (void)close(); }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  bool close() { return number_ < 0 || ::close(std::exchange(number_, -1)) == 0; }

 private:
  int number_ = -1;
};

constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // bytes of one call to read or write

/// How many bytes from `offset` on were read; if not all, errno says why, 0 at the end of the file.
inline std::size_t read_at(const Descriptor& file, void* to, std::size_t bytes, std::uint64_t offset) {
  for (std::size_t done = 0; done < bytes;) {
    errno = 0;
    const ssize_t n = ::pread(file.get(), static_cast<char*>(to) + done, std::min(bytes - done, kMostAtOnce),
                              static_cast<off_t>(offset + done));
    if (n <= 0 && errno != EINTR) return done;
    done += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
  }
  return bytes;
}
/// Whether all was written, from where the file stands; else errno says why not.
inline bool write_all(int descriptor, const void* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = ::write(descriptor, static_cast<const char*>(from) + done, std::min(bytes - done, kMostAtOnce));
    if (n < 0 && errno != EINTR) return false;
    done += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
  }
  return true;
}

/// Makes a file whole or not at all: what write(descriptor) writes to a new file beside it takes
/// its name once it is on the disk. False where that, or `write`, has failed; then errno says why.
/// Only a file is replaced, or a link to one; a device or a directory is refused: Code::data.
template <class Write> bool write_whole(const std::string& path, mode_t mode, const Write& write) {
  if (struct stat there{}; ::stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode))
    fail_with(Code::data, path, ": is ", S_ISDIR(there.st_mode) ? "a directory" : "not a regular file",
              "; refused to write a file in its place");
  const std::string directory = path.substr(0, path.rfind('/') + 1);  // first: once renamed, nothing throws
  const std::string unfinished = path + ".tmp." + std::to_string(std::random_device{}());
  struct Left {
    const char* path = nullptr;
    ~Left() {
      const int error = errno;
      if (path) ::unlink(path);
      errno = error;
    }
  } left;
  Descriptor file(::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file) return false;
  left.path = unfinished.c_str();
  if (!write(file.get()) || ::fsync(file.get()) != 0 || !file.close() ||
      ::rename(unfinished.c_str(), path.c_str()) != 0)
    return false;
  left.path = nullptr;
  // The new name lasts once its directory is on the disk; where that cannot be, it alone is lost.
  if (const Descriptor d(::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)); d)
    (void)::fsync(d.get());
  return true;
}

}  // namespace hilt
