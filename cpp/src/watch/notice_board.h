// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Texts that the ranks of a group post to each other through a store.

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace apex::parallel {

/// A text of each author, all in one key of a store. With a key for each, N ranks that want to know
/// what all have written would ask the store N^2 times, at every look; a store answers some 30,000
/// requests a second. Here a look is one request, and a reading another.
///
///     board.post(*store, "1", "lost");
///     if (board.posts(*store) != seen) texts = board.read(*store);
///
/// All calls block as the store does. A store without append() has a key for each post.
class NoticeBoard {
 public:
  explicit NoticeBoard(std::string key) : key_(std::move(key)) {}

  /// Replaces what `author`, a text without line breaks, has posted before.
  void post(c10d::Store& store, const std::string& author, const std::string& text) const;

  /// How often post() has been called, by all ranks.
  int64_t posts(c10d::Store& store) const;

  /// By author.
  std::map<std::string, std::string> read(c10d::Store& store) const;

 private:
  std::string key_;
};

/// Replaces the value of `key` if it is `expected`; empty: if there is none. Returns what is there.
std::string compare_set(c10d::Store& store, const std::string& key, const std::string& expected,
                        const std::string& desired);

/// Empty if there is none; does not wait for it.
std::string get_or_empty(c10d::Store& store, const std::string& key);

}  // namespace apex::parallel
