// SPDX-License-Identifier: BSD-3-Clause
#include "watch/call_log.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace apex::parallel {

/// Removes the backward number, because ranks may count differently, and the list of buffers,
/// because the broadcast itself reports its differences.
std::string CallLog::in_common(const std::string& what) {
  return what.substr(0, std::min(what.find(", of backward number"), what.find(" ('")));
}

void CallLog::add(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Call& call = last_[static_cast<size_t>(calls_) % kKept];
  call.number = ++calls_;
  call.what = what;
  began_ = std::chrono::steady_clock::now();
}

int64_t CallLog::last_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

CallLog::Last CallLog::last() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (calls_ == 0) return {};
  return {calls_, last_[static_cast<size_t>(calls_ - 1) % kKept].what, began_};
}

std::string CallLog::encode(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text = std::to_string(rank);
  for (int64_t number = std::max(int64_t{1}, calls_ - int64_t{kKept} + 1); number <= calls_;
       ++number) {
    std::string what = in_common(last_[static_cast<size_t>(number - 1) % kKept].what);
    if (what.empty()) continue;
    std::replace(what.begin(), what.end(), '\n', ' ');
    text += '\n' + std::to_string(number) + ' ' + what;
  }
  return text;
}

std::string CallLog::difference(int rank, const std::string& theirs) {
  std::istringstream lines(theirs);
  std::string other, line;
  std::getline(lines, other);
  const std::lock_guard<std::mutex> lock(mutex_);
  while (std::getline(lines, line)) {
    const int64_t number = std::atoll(line.c_str());
    if (number > calls_ || number <= calls_ - int64_t{kKept} || number <= 0) continue;
    const Call& call = last_[static_cast<size_t>(number - 1) % kKept];
    if (call.what.empty()) continue;
    std::string mine = in_common(call.what);
    std::replace(mine.begin(), mine.end(), '\n', ' ');
    const std::string there = line.substr(std::min(line.find(' ') + 1, line.size()));
    if (there != mine)
      return "rank " + std::to_string(rank) + " is in: " + call.what + ", while rank " + other +
             " is in: " + there;
  }
  return {};
}

bool CallLog::goes_further_than(const std::string& theirs) {
  const size_t last = theirs.rfind('\n');
  return last == std::string::npos || last_number() > std::atoll(theirs.c_str() + last + 1);
}

}  // namespace apex::parallel
