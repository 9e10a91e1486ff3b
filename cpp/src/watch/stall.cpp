// SPDX-License-Identifier: BSD-3-Clause
#include "watch/stall.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <apex/parallel/stall_report.h>

#include "standard_error.h"
#include "watch/forced_unwind.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;

using Callback = std::function<void(const std::string&)>;

/// State of the process. Never destroyed, since the watching thread is not joined.
struct Stalls {
  std::mutex mutex;  ///< guards the rest
  std::shared_ptr<const Callback> on_notice;
  std::vector<std::function<std::string()>> readers;
  std::string last_verdict;
  std::atomic<bool> ended{false};  ///< see end_answers()
  std::timed_mutex answering;      ///< held while readers run
};

Stalls& stalls() {
  static auto* const instance = new Stalls;
  return *instance;
}

/// In milliseconds. A value that is not a number is reported and replaced by the default; a
/// negative value turns verdicts off, like 0.
int64_t read_stall_time() {
  constexpr double kLeast = 0.1, kMost = 1e6;
  const char* const given = std::getenv("APEX_STALL_SECONDS");
  if (given == nullptr || *given == '\0') return kDefaultStallTime.count();
  double seconds = 0;
  const char* const end = given + std::strlen(given);
  const auto read = std::from_chars(given, end, seconds);
  if (read.ec != std::errc() || read.ptr != end || !std::isfinite(seconds)) {
    notify("APEX_STALL_SECONDS=" + std::string(given) +
           " is not a number of seconds: the default of 10 is used; 0 disables stall reports");
    return kDefaultStallTime.count();
  }
  return seconds <= 0 ? 0 : static_cast<int64_t>(1000 * std::clamp(seconds, kLeast, kMost));
}

std::atomic<int64_t>& stall_ms() {
  static std::atomic<int64_t> time = read_stall_time();
  return time;
}

double seconds_since(WatchedGroup::Clock::time_point time) {
  return std::chrono::duration<double>(WatchedGroup::Clock::now() - time).count();
}

/// The calls of all channels of `board`.
std::map<std::string, CallLog> calls_of(const Board& board) {
  std::map<std::string, CallLog> calls;
  for (const WatchedGroupPtr& group : all_watched()) {
    if (group->board.get() != &board) continue;
    const std::lock_guard<std::mutex> lock(group->mutex);
    calls[group->channel] = group->calls;
  }
  return calls;
}

std::string read_state() {
  std::unique_lock<std::mutex> lock(stalls().mutex);
  const std::vector<std::function<std::string()>> readers = stalls().readers;
  lock.unlock();
  std::string lines;
  for (const auto& read : readers) {
    std::string more;
    try {
      more = read();
    } catch (APEX_FORCED_UNWIND) {
      throw;
    } catch (...) {
      // The reader has no further facts.
    }
    if (!more.empty()) lines += (lines.empty() ? "" : "\n") + more;
  }
  return lines;
}

}  // namespace

milliseconds stall_time() { return milliseconds(stall_ms()); }
void set_stall_time(milliseconds time) { stall_ms() = time.count(); }

std::string stall_report() {
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  return stalls().last_verdict;
}

void on_notice(Callback callback) {
  auto next = callback ? std::make_shared<const Callback>(std::move(callback)) : nullptr;
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  stalls().on_notice.swap(next);
}

void notify(const std::string& text) {
  write_line_to_stderr("apex: " + text);
  std::unique_lock<std::mutex> lock(stalls().mutex);
  const std::shared_ptr<const Callback> callback = stalls().on_notice;
  lock.unlock();
  if (!callback) return;
  try {
    (*callback)(text);
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    // The text was written to stderr already.
  }
}

void print_report(const std::string& text) {
  notify(text);
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  stalls().last_verdict = text;
}

void add_state_reader(std::function<std::string()> read) {
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  stalls().readers.push_back(std::move(read));
}

RankRecord position_in(WatchedGroup& group) {
  RankRecord record;
  record.calls = calls_of(*group.board);
  const std::lock_guard<std::mutex> lock(group.mutex);
  record.channel = group.channel;
  record.call = group.calls.number;
  record.what = group.calls.name_of(group.calls.number);
  record.waits = !group.waits.empty();
  if (record.call > 0)
    record.seconds = seconds_since(record.waits ? group.waits.front()->since : group.began);
  return record;
}

RankRecord position(const Board& board) {
  RankRecord latest;
  for (const WatchedGroupPtr& group : all_watched()) {
    // Skips other ranks of the group if ranks are threads of one process.
    if (group->board.get() != &board && group->board->group_name == board.group_name) continue;
    RankRecord at = position_in(*group);
    if (at.call != 0 && (latest.call == 0 || std::make_pair(!at.waits, at.seconds) <
                                                 std::make_pair(!latest.waits, latest.seconds)))
      latest = std::move(at);
  }
  latest.calls = calls_of(board);
  const std::lock_guard<std::timed_mutex> lock(stalls().answering);
  if (!stalls().ended) latest.state = read_state();
  return latest;
}

void end_answers() {
  {
    const std::unique_lock<std::timed_mutex> lock(stalls().answering, std::chrono::seconds(1));
    stalls().ended = true;
  }
  stay_for_readers();
}

}  // namespace apex::parallel
