#pragma once
#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] hilt {

/// A list of tokens, rows or ranks. One that counts up by one takes no memory.
class TokenList {
 public:
  using value_type = std::int32_t;  // of an entry
  TokenList() = default;
  explicit TokenList(std::vector<std::int32_t> values) {
    std::size_t n = 0;
    while (n < values.size() && values[n] == values[0] + static_cast<std::int32_t>(n)) ++n;
    if (n < values.size()) list_ = std::move(values);
    else if (n > 0) append(values[0], n);
  }

  std::int32_t operator[](std::size_t i) const {  // entry i
    return list_.empty() ? first_ + static_cast<std::int32_t>(i) : list_[i];
  }
  std::size_t size() const { return list_.empty() ? counted_ : list_.size(); }
  bool empty() const { return size() == 0; }        // it has no entry
  bool counts_up() const { return list_.empty(); }  // and so is not stored; an empty one does

  void push_back(std::int32_t x) { append(x, 1); }  // one more
  /// first, first + 1 .. behind the others.
  void append(std::int32_t first, std::size_t n) {
    if (n == 0) return;
    if (empty()) first_ = first;
    if (list_.empty() && first == first_ + static_cast<std::int32_t>(counted_)) {
      counted_ += n;
      return;
    }
    store();
    for (std::size_t i = 0; i < n; ++i) list_.push_back(first + static_cast<std::int32_t>(i));
  }
  /// Another list, each entry moved by so much.
  void append(const TokenList& more, std::int32_t by = 0) {
    if (more.counts_up()) return append(more.first_ + by, more.counted_);
    for (const std::int32_t x : more.list_) push_back(x + by);
  }

  /// Makes it a list in memory, which data() then shows.
  TokenList& store() {
    if (list_.empty()) list_ = values();
    return *this;
  }
  const std::int32_t* data() const { return list_.data(); }                      // null of one that is not stored
  void fit() { list_.shrink_to_fit(); }                                          // gives room back that is not used
  std::vector<std::int32_t> values() const { return {begin(), end()}; }          // all of it
  std::size_t bytes() const { return list_.capacity() * sizeof(std::int32_t); }  // of memory

  /// What a range-based for needs, and algorithms that walk once.
  struct Iterator {
    using value_type = std::int32_t;                                         // see TokenList
    using difference_type = std::ptrdiff_t;                                  // of two
    using iterator_category = std::forward_iterator_tag;                     // at least
    using reference = std::int32_t;                                          // a value
    using pointer = const std::int32_t*;                                     // none is ever made
    const TokenList* list = nullptr;                                         // whose
    std::size_t at = 0;                                                      // which entry
    std::int32_t operator*() const { return (*list)[at]; }                   // the entry
    Iterator& operator++() { return ++at, *this; }                           // to the next
    Iterator operator++(int) { return {list, at++}; }                        // the same, from where it stood
    friend std::ptrdiff_t operator-(const Iterator& a, const Iterator& b) {  // entries between
      return static_cast<std::ptrdiff_t>(a.at) - static_cast<std::ptrdiff_t>(b.at);
    }
    friend bool operator==(const Iterator& a, const Iterator& b) { return a.at == b.at; }
  };
  using const_iterator = Iterator;                 // entries never change
  Iterator begin() const { return {this, 0}; }     // the first
  Iterator end() const { return {this, size()}; }  // behind the last

  friend bool operator==(const TokenList& a, const TokenList& b) {
    if (a.counts_up() && b.counts_up()) return a.counted_ == b.counted_ && (a.empty() || a.first_ == b.first_);
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::int32_t first_ = 0;
  std::size_t counted_ = 0;
  std::vector<std::int32_t> list_;
};

}  // namespace hilt
