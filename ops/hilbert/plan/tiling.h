#pragma once
#include <algorithm>
#include <cstddef>
#include <numeric>
#include "../../../core/recent.h"
#include "order.h"

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
    store();
    for (const std::int32_t x : more.list_) list_.push_back(x + by);
  }

  /// Makes it a list in memory, which data() then shows.
  TokenList& store() {
    if (list_.empty()) list_ = values();
    return *this;
  }
  const std::int32_t* data() const { return list_.data(); }  // null of one that is not stored
  void fit() { list_.shrink_to_fit(); }                      // gives room back that is not used
  /// All of it.
  std::vector<std::int32_t> values() const {
    if (!list_.empty()) return list_;
    std::vector<std::int32_t> all(counted_);
    std::iota(all.begin(), all.end(), first_);
    return all;
  }
  std::size_t bytes() const { return list_.capacity() * sizeof(std::int32_t); }  // of memory

  /// What a range-based for needs, and algorithms that walk once.
  struct Iterator {
    using value_type = std::int32_t;                        // see TokenList
    using difference_type = std::ptrdiff_t;                 // of two
    const TokenList* list = nullptr;                        // whose
    std::size_t at = 0;                                     // which entry
    std::int32_t operator*() const { return (*list)[at]; }  // the entry
    Iterator& operator++() { return ++at, *this; }          // to the next
    Iterator operator++(int) { return {list, at++}; }       // the same, from where it stood
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

/// One attended set, cut into tiles. Queries and keys stand in lists of tokens; a tile is a run of
/// at most kTile queries against a run of at most kTile keys. Kernels read nothing but this.
struct Tiling {
  static constexpr Index kTile = 128;  // the most rows of a tile
  /// [begin, end).
  struct Range {
    std::int32_t begin, end;  // the first, and the one behind the last
  };
  /// A tile of the other side; partial tiles consult attends(), full ones need not.
  struct Ref {
    std::int32_t tile;  // its number
    bool partial;       // some pairs do not attend
  };
  /// Tiles of the other side that follow each other, all full or all partial.
  struct Run {
    std::int32_t begin, end;  // the first, and the one behind the last
    bool partial;             // as in Ref
    friend bool operator==(const Run&, const Run&) = default;
  };
  /// The tiles of some runs, one by one.
  struct Refs {
    const Run *first, *last;  // the runs, and their end
    /// What a range-based for needs.
    struct Iterator {
      const Run* run;                                                                  // where it stands
      std::int32_t number;                                                             // of the tile in the run
      constexpr Ref operator*() const { return {run->begin + number, run->partial}; }  // the tile
      constexpr Iterator& operator++() {                                               // to the next tile
        if (run->begin + ++number == run->end) ++run, number = 0;
        return *this;
      }
      friend constexpr bool operator==(const Iterator&, const Iterator&) = default;
    };
    constexpr Iterator begin() const { return {first, 0}; }  // the first tile
    constexpr Iterator end() const { return {last, 0}; }     // behind the last
  };
  /// Which tiles each tile of one side has pairs with, ascending.
  struct Lists {
    std::vector<std::int32_t> begin = {0};  // [tiles + 1]: those of tile i are run[begin[i] .. begin[i + 1])
    std::vector<Run> run;                   // of all tiles
    Index full = 0, partial = 0;            // tiles in all runs, by kind

    Index count() const { return std::ssize(begin) - 1; }  // how many tiles have a list
    Refs of(std::size_t i) const { return {run.data() + begin[i], run.data() + begin[i + 1]}; }  // the list of tile i
    void add(std::int32_t first, std::int32_t end, bool is_partial);  // to the list that is not ended yet
    void end_list();                                                  // the next tile's begins
    Lists transposed(std::size_t tiles) const;                        // of each tile of the other side
    friend bool operator==(const Lists& a, const Lists& b) { return a.begin == b.begin && a.run == b.run; }
  };
  /// Runs of queries and keys outside of which nothing attends and inside, but for causality, all.
  struct Group {
    Range q, k;  // rows of each side
  };
  /// What one axis compares: low <= key <= high. Empty: no such test.
  struct Axis {
    std::vector<std::int32_t> key, low, high;  // by key, and by query; of a union, so many an entry as it has boxes
  };

  /// Where the tokens of a document lie, for score terms: those of a name below `first` on no grid.
  struct Sites : Grid {
    std::int32_t first = 0, begin = 0;  // the token of cell 0, and the first of the document
  };

  TokenList q_token, k_token;  // rows of the tensors; with in_order, positions
  TokenList q_name, k_name;    // the tokens behind them, where others: dropout's masks are drawn by them
  /// Heads merge sets in turn. 1 where a set before this one has the row, too; empty where that is
  /// so of all rows, or of none.
  std::vector<std::int32_t> q_known, k_known;
  std::vector<Sites> grids;           // of each document, one behind the other; empty: tokens lie on none
  std::vector<Range> q_tile, k_tile;  // runs of q_token, k_token; each list is covered once, in order
  Lists met;                          // of each tile of queries: which tiles of keys
  std::vector<Group> group;           // all of them
  Index pairs = 0;                    // (query, key) pairs that attend

  // What attends() compares. A union has several boxes: a key attends that is in one of them.
  std::int32_t boxes = 1;         // of the union; 1: no union
  bool causal = false;            // rank of key <= rank of query
  TokenList q_rank, k_rank;       // where those are not the names
  std::array<Axis, 3> axis = {};  // those in front are used

  Memo memo = {};  // what kernels make of it, once made

  /// How many keys are in the tiles that tile i of the queries has pairs with.
  Index keys_of(std::size_t i) const {
    Index n = 0;
    for (std::int32_t r = met.begin[i]; r < met.begin[i + 1]; ++r) {
      const Run& run = met.run[static_cast<std::size_t>(r)];
      n += k_tile[static_cast<std::size_t>(run.end - 1)].end - k_tile[static_cast<std::size_t>(run.begin)].begin;
    }
    return n;
  }
  /// The tokens of queries.
  const TokenList& q_names() const { return q_name.empty() ? q_token : q_name; }
  const TokenList& k_names() const { return k_name.empty() ? k_token : k_name; }  // the tokens of keys
  /// What causality compares, of queries.
  const TokenList& q_ranks() const { return q_rank.empty() ? q_names() : q_rank; }
  /// What causality compares, of keys.
  const TokenList& k_ranks() const { return k_rank.empty() ? k_names() : k_rank; }

  /// Where a tiling lies: lists count from these rows of q and k, names from the token at row k.
  struct Place {
    std::int32_t row = 0, q = 0, k = 0;  // row of the batch
    /// Number i of a list as Places has it.
    [[gnu::always_inline]] static constexpr Place at(const Place* list, Index n, bool each_row, Index i) {
      if (n == 0) return {static_cast<std::int32_t>(i), 0, 0};
      if (!each_row) return list[i];
      return {static_cast<std::int32_t>(i / n), list[i % n].q, list[i % n].k};
    }
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  /// The places of one tiling, each computed for itself.
  struct Places {
    std::vector<Place> list;  // empty: the start of the row
    bool each_row = true;     // those of one row, the same in every row of the batch

    [[gnu::always_inline]] Index count(Index batch) const {  // how many, for so many rows of the batch
      const auto n = std::ssize(list);
      return !each_row ? n : list.empty() ? batch : batch * n;
    }
    /// Number i.
    [[gnu::always_inline]] Place at(Index i) const { return Place::at(list.data(), std::ssize(list), each_row, i); }
    bool are_rows() const { return each_row && list.empty(); }  // one in each row, from its start on
  };
};

}  // namespace hilt
