#pragma once
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <typeindex>
#include <utility>
#include <vector>

// What was made is kept for whoever asks again.

namespace [[gnu::visibility("default")]] hilt {

/// Values by key; the least recently used go when there are more than `most`, or, but for the last
/// `least`, when they exceed max_bytes. Safe from any thread; a copy outlives its eviction.
template <class Key, class Value> class Recent {
 public:
  struct Counters {  // what became of lookups, and what is kept now
    /// Lookups that found, or made; what was dropped; what is kept.
    std::int64_t hits = 0, misses = 0, evictions = 0, entries = 0;
    std::size_t bytes = 0;  // of what is kept
  };

  /// The limits, as above.
  explicit Recent(std::size_t most, std::size_t max_bytes = std::numeric_limits<std::size_t>::max(),
                  std::size_t least = 0)
      : most_(most), max_bytes_(max_bytes), least_(least) {}

  /// The value of this key, from make() where none is kept; bytes_of(value): what it is charged.
  template <class Make, class Bytes> Value get(const Key& key, const Make& make, const Bytes& bytes_of) {
    {
      const std::lock_guard lock(mutex_);
      if (const Value* known = find(key)) return ++counters_.hits, *known;
      ++counters_.misses;
    }
    // Made without the lock: other keys need not wait. Two threads may make one; the first is kept.
    Value made = make();
    const std::size_t bytes = bytes_of(made);
    const std::lock_guard lock(mutex_);
    if (const Value* known = find(key)) return *known;
    if (bytes > max_bytes_ && least_ == 0) return made;
    std::list<Entry> entry{{key, made, bytes}};
    by_key_.emplace(key, entry.begin());
    entries_.splice(entries_.begin(), entry);  // cannot throw: both containers change or neither
    counters_.bytes += bytes;
    for (; entries_.size() > most_ || (entries_.size() > least_ && counters_.bytes > max_bytes_); entries_.pop_back()) {
      counters_.bytes -= entries_.back().bytes;
      by_key_.erase(entries_.back().key);
      ++counters_.evictions;
    }
    return made;
  }
  template <class Make> Value get(const Key& key, const Make& make) {
    return get(key, make, [](const Value&) { return std::size_t{0}; });
  }
  void clear() {  // forgets everything, counters too
    const std::lock_guard lock(mutex_);
    by_key_.clear(), entries_.clear();
    counters_ = {};
  }
  Counters counters() const {
    const std::lock_guard lock(mutex_);
    Counters now = counters_;
    now.entries = std::ssize(entries_);
    return now;
  }

 private:
  struct Entry {
    Key key;
    Value value;
    std::size_t bytes;
  };
  /// It becomes the first. Under the lock.
  const Value* find(const Key& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->value;
  }

  mutable std::mutex mutex_;
  std::size_t most_, max_bytes_, least_;
  std::list<Entry> entries_;  // the most recently used first
  std::map<Key, typename std::list<Entry>::iterator> by_key_;
  Counters counters_;
};

/// What was made of a thing and stays with it, by type and key: each once, by the first caller.
/// Callers that ask for the same wait for it. A copy begins empty.
class Memo {
 public:
  using Key = std::vector<std::int32_t>;  // what tells values of one type apart
  Memo() = default;
  Memo(const Memo&) noexcept {}
  Memo& operator=(const Memo&) noexcept { return slots_.clear(), *this; }  // begins anew

  /// The X of this key, from make() where there is none yet.
  template <class X, class Make> const X& get(const Key& key, const Make& make) const {
    const std::shared_ptr<Slot> slot = slot_of(typeid(X), key);
    const std::lock_guard lock(slot->mutex);
    if (!slot->value) slot->value = std::make_shared<const X>(make());
    return *static_cast<const X*>(slot->value.get());
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const void> value;
  };
  std::shared_ptr<Slot> slot_of(std::type_index type, const Key& key) const {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Slot>& slot = slots_[{type, key}];
    if (!slot) slot = std::make_shared<Slot>();
    return slot;
  }
  mutable std::mutex mutex_;
  mutable std::map<std::pair<std::type_index, Key>, std::shared_ptr<Slot>> slots_;
};

}  // namespace hilt
