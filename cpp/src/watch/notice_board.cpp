// SPDX-License-Identifier: BSD-3-Clause
#include "watch/notice_board.h"

#include <cstdlib>
#include <vector>

namespace apex::parallel {

namespace {

std::string as_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }

/// An entry: "LENGTH AUTHOR\nTEXT".
void decode_entries(const std::string& entries, std::map<std::string, std::string>& by_author) {
  for (size_t begin = 0; begin < entries.size();) {
    const size_t space = entries.find(' ', begin);
    const size_t line = entries.find('\n', begin);
    if (line == std::string::npos || space > line) return;
    const auto length = static_cast<size_t>(std::atoll(entries.c_str() + begin));
    if (length > entries.size() - line - 1) return;
    by_author[entries.substr(space + 1, line - space - 1)] = entries.substr(line + 1, length);
    begin = line + 1 + length;
  }
}

}  // namespace

void NoticeBoard::post(c10d::Store& store, const std::string& author,
                       const std::string& text) const {
  const std::string entry = std::to_string(text.size()) + ' ' + author + '\n' + text;
  const std::vector<uint8_t> bytes(entry.begin(), entry.end());
  if (store.hasExtendedApi()) {
    store.append(key_, bytes);
  } else {
    store.set(key_ + '/' + std::to_string(store.add(key_ + "/next", 1)), bytes);
  }
  store.add(key_ + "/posts", 1);  // last, so that a rank that sees the count finds the entry
}

int64_t NoticeBoard::posts(c10d::Store& store) const { return count_of(store, key_ + "/posts"); }

std::map<std::string, std::string> NoticeBoard::read(c10d::Store& store) const {
  std::map<std::string, std::string> by_author;
  if (posts(store) == 0) return by_author;  // get() of an unset key would block
  if (store.hasExtendedApi()) {
    decode_entries(as_text(store.get(key_)), by_author);
    return by_author;
  }
  const int64_t last = count_of(store, key_ + "/next");
  for (int64_t number = 1; number <= last; ++number) {
    const std::string key = key_ + '/' + std::to_string(number);
    if (store.check({key})) decode_entries(as_text(store.get(key)), by_author);
  }
  return by_author;
}

std::string compare_set(c10d::Store& store, const std::string& key, const std::string& expected,
                        const std::string& desired) {
  using Bytes = std::vector<uint8_t>;
  return as_text(store.compareSet(key, Bytes(expected.begin(), expected.end()),
                                  Bytes(desired.begin(), desired.end())));
}

std::string get_or_empty(c10d::Store& store, const std::string& key) {
  return store.check({key}) ? as_text(store.get(key)) : std::string();
}

int64_t count_of(c10d::Store& store, const std::string& key) {
  if (store.hasExtendedApi()) return store.add(key, 0);  // one request
  return std::atoll(get_or_empty(store, key).c_str());
}

}  // namespace apex::parallel
