#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <typeindex>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] hilt {

/// What was made of a thing and stays with it, by type and key: each once, by who asks first. Only
/// who asks for the same waits. A copy begins empty.
class Memo {
 public:
  using Key = std::vector<std::int32_t>;  // what tells values of one type apart
  Memo() = default;
  Memo(const Memo&) noexcept {}
  Memo& operator=(const Memo&) noexcept { return rooms_.clear(), *this; }  // begins anew

  /// The X of this key, from make() where there is none yet.
  template <class X, class Make> const X& get(const Key& key, const Make& make) const {
    const std::shared_ptr<Room> room = room_of(typeid(X), key);
    const std::lock_guard lock(room->mutex);
    if (!room->value) room->value = std::make_shared<const X>(make());
    return *static_cast<const X*>(room->value.get());
  }

 private:
  struct Room {
    std::mutex mutex;
    std::shared_ptr<const void> value;
  };
  std::shared_ptr<Room> room_of(std::type_index type, const Key& key) const {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Room>& room = rooms_[{type, key}];
    if (!room) room = std::make_shared<Room>();
    return room;
  }
  mutable std::mutex mutex_;
  mutable std::map<std::pair<std::type_index, Key>, std::shared_ptr<Room>> rooms_;
};

}  // namespace hilt
