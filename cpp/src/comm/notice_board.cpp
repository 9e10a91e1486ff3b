// SPDX-License-Identifier: BSD-3-Clause
#include "comm/notice_board.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace apex::parallel {

namespace {

std::string as_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }

/// An entry: "RANK LENGTH\nTEXT"; the length is -1 where the rank has withdrawn its text.
void decode_entries(const std::string& entries, std::map<int, std::string>& by_rank) {
  for (size_t begin = 0; begin < entries.size();) {
    const size_t space = entries.find(' ', begin);
    const size_t line = entries.find('\n', begin);
    if (space == std::string::npos || line == std::string::npos) return;
    const int rank = std::atoi(entries.c_str() + begin);
    const int64_t length = std::atoll(entries.c_str() + space + 1);
    begin = line + 1;
    by_rank.erase(rank);
    if (length < 0) continue;
    by_rank[rank] = entries.substr(begin, static_cast<size_t>(length));
    begin += static_cast<size_t>(length);
  }
}

}  // namespace

void NoticeBoard::post(c10d::Store& store, int rank, const std::string& text) const {
  append(store, std::to_string(rank) + ' ' + std::to_string(text.size()) + '\n' + text);
}

void NoticeBoard::withdraw(c10d::Store& store, int rank) const {
  append(store, std::to_string(rank) + " -1\n");
}

void NoticeBoard::append(c10d::Store& store, const std::string& entry) const {
  const std::vector<uint8_t> bytes(entry.begin(), entry.end());
  if (store.hasExtendedApi()) {
    store.append(key_, bytes);
  } else {
    store.set(key_ + '/' + std::to_string(store.add(key_ + "/next", 1)), bytes);
  }
  store.add(key_ + "/posts", 1);  // then: who sees it finds the entry
}

int64_t NoticeBoard::posts(c10d::Store& store) const { return store.add(key_ + "/posts", 0); }

std::map<int, std::string> NoticeBoard::read(c10d::Store& store) const {
  std::map<int, std::string> by_rank;
  if (posts(store) == 0) return by_rank;  // to get what is not there would block
  if (store.hasExtendedApi()) {
    decode_entries(as_text(store.get(key_)), by_rank);
    return by_rank;
  }
  const int64_t last = store.add(key_ + "/next", 0);
  for (int64_t number = 1; number <= last; ++number) {
    const std::string key = key_ + '/' + std::to_string(number);
    if (store.check({key})) decode_entries(as_text(store.get(key)), by_rank);
  }
  return by_rank;
}

}  // namespace apex::parallel
