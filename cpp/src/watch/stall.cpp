// SPDX-License-Identifier: BSD-3-Clause
#include "watch/stall.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <locale>
#include <sstream>
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

/// Milliseconds. What is no number is said, and the default; negative ones are never, as 0 is.
int64_t read_stall_time() {
  constexpr double kDefault = 10, kLeast = 0.1, kMost = 1e6;
  const char* const given = std::getenv("APEX_STALL_SECONDS");
  if (given == nullptr || *given == '\0') return static_cast<int64_t>(1000 * kDefault);
  std::istringstream in(given);
  in.imbue(std::locale::classic());
  double seconds = 0;
  if (!(in >> seconds) || !(in >> std::ws).eof() || !std::isfinite(seconds)) {
    write_line_to_stderr("apex: APEX_STALL_SECONDS=" + std::string(given) +
                         " is no number of seconds: 10 is used; 0 switches stall verdicts off");
    seconds = kDefault;
  }
  return seconds <= 0 ? 0 : static_cast<int64_t>(1000 * std::clamp(seconds, kLeast, kMost));
}

std::atomic<int64_t>& stall_ms() {
  static std::atomic<int64_t> time = read_stall_time();
  return time;
}

/// After which a verdict of that group is due.
milliseconds limit_of(const WatchedGroup& group) {
  return group.timeout > milliseconds(0) ? std::min(milliseconds(stall_ms()), group.timeout / 3)
                                         : milliseconds(stall_ms());
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
  at.group = group.label();
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

/// One key for each rank: what it has said before is of no use.
std::string key_of_rank(WatchedGroup& group, c10d::Store& store, int rank) {
  return key_of(group, store) + '/' + std::to_string(rank);
}

void post(c10d::Store& store, WatchedGroup& group, const Whereabouts& at) {
  const std::string text = at.encode();
  store.set(key_of_rank(group, store, group.rank), std::vector<uint8_t>(text.begin(), text.end()));
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
  stall.note = group.note;
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
  post(store, group, at);
  group.told_elsewhere = !at.waits;
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
                               Clock::now() + timing::between_answers(limit_of(*group)));
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
                             Clock::now() + timing::between_answers(limit_of(*group)));
}

namespace {

/// One of the ranks that wait says who holds them up, and the same one again if that changes.
bool speaks(WatchedGroup& group, c10d::Store& store, int64_t call) {
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    if (group.speaks_in == call) return true;
  }
  const std::string key =
      key_of(group, store) + "/printed/" + group.label() + '/' + std::to_string(call);
  if (store.add(key, 1) != 1) return false;
  const std::lock_guard<std::mutex> lock(group.mutex);
  group.speaks_in = call;
  group.said.clear();
  return true;
}

bool is_news(WatchedGroup& group, const std::string& signature) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  return std::exchange(group.said, signature + '.') != signature + '.';
}

}  // namespace

StallWatch::StallWatch(WatchedGroupPtr group)
    : group_(std::move(group)),
      since_(Clock::now() - timing::kUsual),
      call_(group_->calls.last_number()),
      limit_(limit_of(*group_)),
      due_(std::max(limit_, timing::kUsual + limit_ - timing::until_asked(limit_))) {
  group_->waits_since = since_;
  ++group_->waits;
  if (group_->stalled.exchange(false)) {  // of an earlier wait in the same call
    const std::lock_guard<std::mutex> lock(group_->mutex);
    group_->stall.clear();
  }
}

StallWatch::~StallWatch() {
  --group_->waits;
  if (!posted_) return;
  group_->store->post(
      [group = group_](c10d::Store& store) { post(store, *group, whereabouts(*group, false)); });
}

/// What this rank has told the others is that it does not wait: somebody was waiting already.
void StallWatch::correct() {
  if (posted_ || !group_->root()->told_elsewhere.exchange(false)) return;
  posted_ = true;
  group_->store->post(
      [group = group_](c10d::Store& store) { post(store, *group, whereabouts(*group, true)); });
}

void StallWatch::poll() {
  if (limit_ == milliseconds(0)) return;
  correct();
  const auto waited = Clock::now() - since_;
  if (!round_ && waited >= due_ - (limit_ - timing::until_asked(limit_))) {
    posted_ = true;
    round_ = std::make_shared<Round>();
    group_->store->post([group = group_, round = round_, call = call_](c10d::Store& store) {
      post(store, *group, whereabouts(*group, true));
      round->asked = store.add(key_of(*group, store) + "/asked", 1);
      round->asked_at = Clock::now();
    });
  }
  if (round_ && !verdict_.valid() && waited >= due_) {
    verdict_ = group_->store->post([group = group_, round = round_, call = call_,
                                    limit = limit_](c10d::Store& store) {
      const auto is_over = [&] { return group->waits == 0 || group->calls.last_number() != call; };
      if (is_over() || round->alone) return;
      // The store has answered late: nobody had the time to.
      if (Clock::now() - round->asked_at < timing::until_answered(limit)) return;
      if (!speaks(*group, store, call)) return;
      Stall stall = stall_of(*group);
      stall.mine.asked = round->asked;
      for (int rank = 0; rank < group->size; ++rank) {
        const std::string text = get_or_empty(store, key_of_rank(*group, store, rank));
        if (!text.empty()) stall.others[rank] = Whereabouts::decode(text);
      }
      if (is_over() || !is_news(*group, signature(stall))) return;
      print(*group, stall);
    });
  }
  const bool done =
      verdict_.valid() && verdict_.wait_for(milliseconds(0)) == std::future_status::ready;
  if (done) {  // the same again, later: it may be held up by something else then
    due_ *= 2;
    round_.reset();
    verdict_ = {};
    return;
  }
  const bool late = verdict_.valid() && waited >= due_ + timing::until_alone(limit_) - limit_;
  if (!late || alone_) return;
  alone_ = round_->alone = true;
  Stall stall = stall_of(*group_);
  stall.store_answers = false;
  print(*group_, stall);
}

}  // namespace apex::parallel
