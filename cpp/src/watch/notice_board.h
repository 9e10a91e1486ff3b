// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A message board in a store, for texts between the ranks of a group.

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace apex::parallel {

/// Holds one text per author, all under one key of a store. With a key per author, N ranks that
/// poll all authors would make N^2 requests per poll, and a store answers some 30,000 requests a
/// second. Here polling takes one request, and reading one more.
///
///     board.post(*store, "1", "lost");
///     if (board.posts(*store) != seen) texts = board.read(*store);
///
/// All calls block as the store does. A store without append() uses one key per post.
class NoticeBoard {
 public:
  explicit NoticeBoard(std::string key) : key_(std::move(key)) {}

  /// Replaces the earlier text of `author`, a name without line breaks.
  void post(c10d::Store& store, const std::string& author, const std::string& text) const;

  /// Number of calls of post() by all ranks.
  int64_t posts(c10d::Store& store) const;

  /// All texts, by author.
  std::map<std::string, std::string> read(c10d::Store& store) const;

 private:
  std::string key_;
};

/// Replaces the value of `key` if it is `expected` (empty: if the key is unset). Returns the
/// current value.
std::string compare_set(c10d::Store& store, const std::string& key, const std::string& expected,
                        const std::string& desired);

/// The value of `key`, or "" if it is unset. Does not wait for the key.
std::string get_or_empty(c10d::Store& store, const std::string& key);

/// The number that add() has counted under `key`. Unlike `store.add(key, 0)` it adds nothing to the
/// file of a FileStore, which keeps a record of every call.
int64_t count_of(c10d::Store& store, const std::string& key);

}  // namespace apex::parallel
