// SPDX-License-Identifier: BSD-3-Clause
#include "watch/stall.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <utility>
#include <vector>

#include <apex/parallel/stall_report.h>

#include "standard_error.h"
#include "watch/forced_unwind.h"
#include "watch/stall_verdict.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

using Clock = StallWatch::Clock;
using std::chrono::milliseconds;

/// Of the process; never destroyed, as the store's threads are not waited for.
struct Stalls {
  std::mutex mutex;  ///< guards the rest
  std::vector<std::function<std::string()>> readers;
  std::string last_verdict;
  bool ended = false;  ///< see end_answers()
  int answering = 0;
  std::condition_variable answered;
};

Stalls& stalls() {
  static auto* const instance = new Stalls;
  return *instance;
}

std::atomic<int64_t>& stall_ms() {
  static std::atomic<int64_t> time = [] {
    const char* const given = std::getenv("APEX_STALL_SECONDS");
    return given == nullptr ? 10000 : static_cast<int64_t>(1000 * std::atof(given));
  }();
  return time;
}

/// Groups that were made from one share its board.
std::string key_of(WatchedGroup& group, c10d::Store& store) {
  return group.root()->key(store, "stall");
}

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

std::string read_state() {
  std::vector<std::function<std::string()>> readers;
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    readers = stalls().readers;
  }
  std::string lines;
  for (const auto& read : readers) {
    std::string more;
    try {
      more = read();
    } catch (APEX_FORCED_UNWIND) {
      throw;
    } catch (...) {
      // It has nothing to add.
    }
    if (!more.empty()) lines += (lines.empty() ? "" : "\n") + more;
  }
  return lines;
}

Whereabouts whereabouts(WatchedGroup& group, bool waits) {
  const CallLog::Last last = group.calls.last();
  Whereabouts at;
  at.group = group.name;
  at.call = last.number;
  at.what = last.what;
  at.waits = waits;
  if (last.number != 0) at.seconds = seconds_since(waits ? group.waits_since.load() : last.began);
  return at;
}

/// In which group the rank of `asked` waits, or else has called last.
Whereabouts latest_of(const WatchedGroup& asked) {
  Whereabouts latest;
  for (const WatchedGroupPtr& group : all_watched()) {
    // Where ranks are threads of one process.
    if (group->group_name == asked.group_name && group->rank != asked.rank) continue;
    Whereabouts at = whereabouts(*group, group->waits > 0);
    const bool known = at.call != 0;
    if (known && (latest.call == 0 || std::make_pair(!at.waits, at.seconds) <
                                          std::make_pair(!latest.waits, latest.seconds)))
      latest = std::move(at);
  }
  latest.state = read_state();
  return latest;
}

void post(c10d::Store& store, WatchedGroup& group, const Whereabouts& at) {
  NoticeBoard(key_of(group, store)).post(store, std::to_string(group.rank), at.encode());
}

void print(WatchedGroup& group, const Stall& stall) {
  const std::string verdict = describe(stall);
  write_line_to_stderr("apex: " + verdict);
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    stalls().last_verdict = verdict;
  }
  const std::lock_guard<std::mutex> lock(group.mutex);
  group.stall = verdict;
  group.stalled = true;
}

Stall stall_of(WatchedGroup& group) {
  Stall stall;
  stall.rank = group.rank;
  stall.size = group.size;
  stall.mine = whereabouts(group, true);
  stall.processes = look_around(group);
  stall.seconds_left =
      std::max(0.0, std::chrono::duration<double>(group.timeout).count() - stall.mine.seconds);
  return stall;
}

}  // namespace

milliseconds stall_time() { return milliseconds(stall_ms()); }
void set_stall_time(milliseconds time) { stall_ms() = time.count(); }

std::string stall_report() {
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  return stalls().last_verdict;
}

void add_state_reader(std::function<std::string()> read) {
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  stalls().readers.push_back(std::move(read));
}

namespace {

/// Asks, and answers where somebody waits. Returns how often ranks had asked.
int64_t look_and_answer(WatchedGroup& group, c10d::Store& store, int64_t seen) {
  const int64_t asked = store.add(key_of(group, store) + "/asked", 0);
  if (asked == seen) return asked;
  Whereabouts at = latest_of(group);
  at.asked = asked;
  // A rank that waits in this group posts so by itself, in time.
  const bool posts_itself =
      at.waits && at.group == group.name &&
      std::chrono::duration<double>(at.seconds) >= timing::until_asked(stall_time());
  if (!posts_itself) post(store, group, at);
  return asked;
}

/// Comes again and again; ends with the group, and with the store.
void answer(const std::weak_ptr<WatchedGroup>& weak, int64_t seen) {
  const WatchedGroupPtr group = weak.lock();
  if (!group || stall_time() == milliseconds(0)) return;
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    if (stalls().ended) return;
    ++stalls().answering;
  }
  bool goes_on = true;
  try {
    // A process that has ended may have kept the store, whose loss torch logs with every call.
    if (look_around(*group, ProcessState::kEnded).empty())
      group->store->run([&](c10d::Store& store) { seen = look_and_answer(*group, store, seen); });
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    goes_on = group->store->is_there();  // it may be reached again
  }
  if (goes_on) {
    group->store->thread().run([weak, seen] { answer(weak, seen); },
                               Clock::now() + timing::between_answers(stall_time()));
  }
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  --stalls().answering;
  stalls().answered.notify_all();
}

}  // namespace

void end_answers() {
  std::unique_lock<std::mutex> lock(stalls().mutex);
  stalls().ended = true;
  stalls().answered.wait_for(lock, std::chrono::seconds(1), [] { return stalls().answering == 0; });
}

void answer_stalls(const WatchedGroupPtr& group) {
  if (stall_time() == milliseconds(0)) return;
  group->store->thread().run([weak = std::weak_ptr<WatchedGroup>(group)] { answer(weak, 0); },
                             Clock::now() + timing::between_answers(stall_time()));
}

StallWatch::StallWatch(WatchedGroupPtr group)
    : group_(std::move(group)),
      since_(Clock::now() - timing::kUsual),
      call_(group_->calls.last_number()),
      limit_(group_->timeout > milliseconds(0) ? std::min(stall_time(), group_->timeout / 3)
                                               : stall_time()) {
  group_->waits_since = since_;
  ++group_->waits;
}

StallWatch::~StallWatch() {
  --group_->waits;
  if (!posted_) return;
  group_->store->post(
      [group = group_](c10d::Store& store) { post(store, *group, whereabouts(*group, false)); });
}

void StallWatch::poll() {
  if (limit_ == milliseconds(0)) return;
  const auto waited = Clock::now() - since_;
  if (!posted_ && waited >= timing::until_asked(limit_)) {
    posted_ = true;
    group_->store->post([group = group_, number = asked_](c10d::Store& store) {
      post(store, *group, whereabouts(*group, true));
      *number = store.add(key_of(*group, store) + "/asked", 1);
    });
  }
  if (!verdict_.valid() && waited >= limit_) {
    verdict_ = group_->store->post([group = group_, number = asked_,
                                    call = call_](c10d::Store& store) {
      const auto is_over = [&] { return group->waits == 0 || group->calls.last_number() != call; };
      const std::string key =
          key_of(*group, store) + "/printed/" + group->name + '/' + std::to_string(call);
      if (is_over() || store.add(key, 1) != 1) return;
      Stall stall = stall_of(*group);
      stall.mine.asked = *number;
      for (const auto& [author, text] : NoticeBoard(key_of(*group, store)).read(store))
        stall.others[std::atoi(author.c_str())] = Whereabouts::decode(text);
      if (!is_over()) print(*group, stall);
    });
  }
  const bool late = waited >= timing::until_alone(limit_) &&
                    verdict_.wait_for(milliseconds(0)) != std::future_status::ready;
  if (!late || printed_) return;
  printed_ = true;
  Stall stall = stall_of(*group_);
  stall.store_answers = false;
  print(*group_, stall);
}

}  // namespace apex::parallel
