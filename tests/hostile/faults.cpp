// A library put in front of the C library of one process (LD_PRELOAD). It counts the calls that
// change files below HILT_FAULT_UNDER, writes each into HILT_FAULT_TRACE, and lets number
// HILT_FAULT_AT fail: with an errno (HILT_FAULT_HOW=error) or by killing the process before it.
// HILT_FAULT_HOW=stop lets none fail: the process stops itself (SIGSTOP) before each
// HILT_FAULT_AT-th call, or before main() where that is 0. HILT_FAULT_HOW=end stops it once, when
// it is over.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

template <class F> F* real(const char* name) { return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name)); }
#define REAL(name) static auto* const real_##name = real<decltype(::name)>(#name)

struct Faults {
  std::string under = env("HILT_FAULT_UNDER"), how = env("HILT_FAULT_HOW");
  long at = std::atol(env("HILT_FAULT_AT").c_str());
  int trace = -1;
  std::atomic<long> count{0};
  std::mutex mutex;

  static std::string env(const char* name) {
    const char* const text = std::getenv(name);
    return text ? text : "";
  }
  Faults() {
    const std::string path = env("HILT_FAULT_TRACE");
    if (!path.empty())
      trace = real<decltype(::open)>("open")(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }
};
Faults& faults() {
  static Faults& f = *new Faults;
  return f;
}

std::string absolute(const char* path) {
  if (path[0] == '/') return path;
  char here[PATH_MAX];
  return std::string(::getcwd(here, sizeof here) ? here : "") + '/' + path;
}
std::string name_of(int descriptor) {
  char path[PATH_MAX];
  const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return n > 0 ? std::string(path, static_cast<std::size_t>(n)) : "";
}
bool is_ours(const std::string& path) {
  const std::string& under = faults().under;
  return !under.empty() && path.starts_with(under) && (path.size() == under.size() || path[under.size()] == '/');
}

/// One call that is about to happen. False: it fails, with errno set.
bool may(const char* call, int error, const std::string& first, const std::string& second = "", long number = 0,
         const void* data = nullptr, std::size_t bytes = 0) {
  Faults& f = faults();
  const std::lock_guard lock(f.mutex);
  const long n = ++f.count;
  if (f.how == "stop") {
    if (f.at > 0 && n % f.at == 0) ::raise(SIGSTOP);
  } else if (f.at == n) {
    if (f.how == "kill") ::kill(::getpid(), SIGKILL);
    errno = error;
    return false;
  }
  if (f.trace < 0) return true;
  std::string line = std::string(call) + '\t' + first + '\t' + second + '\t' + std::to_string(number) + '\t';
  constexpr char kHex[] = "0123456789abcdef";
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    line += kHex[byte >> 4], line += kHex[byte & 15];
  }
  line += '\n';
  REAL(write);
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t wrote = real_write(f.trace, line.data() + done, line.size() - done);
    if (wrote <= 0) std::abort();
    done += static_cast<std::size_t>(wrote);
  }
  return true;
}

/// Where the next write goes: at the end for a file that is appended to.
long place_of(int descriptor) {
  const bool appends = (::fcntl(descriptor, F_GETFL) & O_APPEND) != 0;
  return ::lseek(descriptor, 0, appends ? SEEK_END : SEEK_CUR);
}
bool may_open(const char* path, int flags) {
  const std::string name = absolute(path);
  if ((flags & (O_CREAT | O_TRUNC)) == 0 || !is_ours(name)) return true;
  if ((flags & O_CREAT) && ::access(path, F_OK) != 0) return may("create", ENOSPC, name);
  return (flags & O_TRUNC) == 0 || may("truncate", EIO, name);
}

[[gnu::constructor]] void stop_before_main() {
  if (faults().how == "stop" && faults().at == 0) ::raise(SIGSTOP);
}
[[gnu::destructor]] void stop_at_the_end() {
  if (faults().how == "end") ::raise(SIGSTOP);
}

}  // namespace

// NOLINTBEGIN: these are the C library's own names.
extern "C" {

int open(const char* path, int flags, ...) {
  REAL(open);
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0;
  va_end(list);
  return may_open(path, flags) ? real_open(path, flags, mode) : -1;
}
int open64(const char* path, int flags, ...) {
  REAL(open64);
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0;
  va_end(list);
  return may_open(path, flags) ? real_open64(path, flags, mode) : -1;
}
// What std::ofstream opens with.
FILE* fopen(const char* path, const char* mode) {
  REAL(fopen);
  return mode[0] != 'w' || may_open(path, O_CREAT | O_TRUNC) ? real_fopen(path, mode) : nullptr;
}
FILE* fopen64(const char* path, const char* mode) {
  REAL(fopen64);
  return mode[0] != 'w' || may_open(path, O_CREAT | O_TRUNC) ? real_fopen64(path, mode) : nullptr;
}
ssize_t write(int d, const void* data, size_t bytes) {
  REAL(write);
  const std::string name = name_of(d);
  return !is_ours(name) || may("write", ENOSPC, name, "", place_of(d), data, bytes) ? real_write(d, data, bytes) : -1;
}
ssize_t writev(int d, const iovec* parts, int n) {
  REAL(writev);
  const std::string name = name_of(d);
  if (is_ours(name)) {
    std::string all;
    for (int i = 0; i < n; ++i) all.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    if (!may("write", ENOSPC, name, "", place_of(d), all.data(), all.size())) return -1;
  }
  return real_writev(d, parts, n);
}
int ftruncate(int d, off_t length) {
  REAL(ftruncate);
  const std::string name = name_of(d);
  return !is_ours(name) || may("resize", EIO, name, "", length) ? real_ftruncate(d, length) : -1;
}
int fsync(int d) {
  REAL(fsync);
  const std::string name = name_of(d);
  return !is_ours(name) || may("sync", EIO, name) ? real_fsync(d) : -1;
}
int fdatasync(int d) {
  REAL(fdatasync);
  const std::string name = name_of(d);
  return !is_ours(name) || may("sync", EIO, name) ? real_fdatasync(d) : -1;
}
int close(int d) {
  REAL(close);
  const std::string name = name_of(d);
  const bool closes = !is_ours(name) || (::fcntl(d, F_GETFL) & O_ACCMODE) == O_RDONLY || may("close", EIO, name);
  const int result = real_close(d);  // an error of close() closes all the same
  return closes ? result : (errno = EIO, -1);
}
int rename(const char* from, const char* to) {
  REAL(rename);
  return !is_ours(absolute(to)) || may("rename", EIO, absolute(from), absolute(to)) ? real_rename(from, to) : -1;
}
int unlink(const char* path) {
  REAL(unlink);
  return !is_ours(absolute(path)) || may("unlink", EIO, absolute(path)) ? real_unlink(path) : -1;
}
int remove(const char* path) {
  REAL(remove);
  return !is_ours(absolute(path)) || may("unlink", EIO, absolute(path)) ? real_remove(path) : -1;
}
int rmdir(const char* path) {
  REAL(rmdir);
  return !is_ours(absolute(path)) || may("unlink", EIO, absolute(path)) ? real_rmdir(path) : -1;
}
int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  return !is_ours(absolute(path)) || may("mkdir", EIO, absolute(path)) ? real_mkdir(path, mode) : -1;
}
void* mmap(void* at, size_t bytes, int protection, int flags, int d, off_t offset) {
  REAL(mmap);
  if (d >= 0 && is_ours(name_of(d)) && !may("map", ENOMEM, name_of(d))) return MAP_FAILED;
  return real_mmap(at, bytes, protection, flags, d, offset);
}

}  // extern "C"
// NOLINTEND
