#pragma once
#include <cstdlib>
#include <optional>
#include <string>
#include "core/parallel.h"
#include "core/storage.h"

namespace hilt {

/// Sets an environment variable for a scope.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    if (const char* now = std::getenv(name)) before_ = now;
    setenv(name, value, 1);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Sets the number of threads for a scope.
class Threads {
 public:
  explicit Threads(int n) { set_thread_count(n); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() { set_thread_count(before_); }

 private:
  int before_ = thread_count();
};

/// Starts a scope with an empty pool that keeps up to `bytes`.
class PoolLimit {
 public:
  explicit PoolLimit(std::size_t bytes) {
    release_pool();
    set_pool_limit(bytes);
  }
  PoolLimit(const PoolLimit&) = delete;
  PoolLimit& operator=(const PoolLimit&) = delete;
  ~PoolLimit() {
    const char* text = std::getenv("HILT_POOL_BYTES");
    set_pool_limit(text ? std::strtoull(text, nullptr, 10) : std::size_t{4} << 30);
  }
};

}  // namespace hilt
