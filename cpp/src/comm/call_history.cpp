// SPDX-License-Identifier: BSD-3-Clause
#include "comm/call_history.h"

#include <algorithm>

namespace apex::parallel {

/// Ranks may count their backwards differently, and yet be in the same one; and buffers that differ
/// are for the broadcast itself to find.
std::string CallHistory::in_common(const std::string& what) {
  return what.substr(0, std::min(what.find(", of backward number"), what.find(" ('")));
}

void CallHistory::add(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Call& call = last_[static_cast<size_t>(calls_) % kKept];
  call.number = ++calls_;
  call.what = what;
}

int64_t CallHistory::last_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

std::string CallHistory::compare(c10d::Store& store, const std::string& group, int rank) {
  std::array<Call, kKept> calls;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls = last_;
  }
  std::sort(calls.begin(), calls.end(),
            [](const Call& a, const Call& b) { return a.number < b.number; });
  for (const Call& call : calls) {
    if (call.number == 0) continue;
    const std::string key = "apex/calls/" + group + "/" + std::to_string(call.number);
    const std::string text = std::to_string(rank) + ' ' + in_common(call.what);
    const std::vector<uint8_t> mine(text.begin(), text.end());
    const std::vector<uint8_t> there = store.compareSet(key, {}, mine);
    if (there == mine) {
      if (std::find(written_.begin(), written_.end(), key) == written_.end())
        written_.push_back(key);
      continue;
    }
    const std::string other(there.begin(), there.end());
    const size_t space = other.find(' ');
    if (space == std::string::npos || other.substr(space + 1) == in_common(call.what)) continue;
    return "rank " + std::to_string(rank) + " is in: " + call.what + ", while rank " +
           other.substr(0, space) + " is in: " + other.substr(space + 1);
  }
  return {};
}

void CallHistory::forget(c10d::Store& store) {
  for (const std::string& key : written_) store.deleteKey(key);
  written_.clear();
}

namespace {
thread_local const std::string* current_name = nullptr;
}  // namespace

NamedCollective::NamedCollective(const std::string& name) : before_(current_name) {
  current_name = &name;
}

NamedCollective::~NamedCollective() { current_name = before_; }

std::string NamedCollective::current(const char* otherwise) {
  return current_name == nullptr ? otherwise : *current_name;
}

}  // namespace apex::parallel
