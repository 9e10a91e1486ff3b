// SPDX-License-Identifier: BSD-3-Clause
#include "watch/stall.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <locale>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include <apex/parallel/stall_report.h>

#include "distributed/backends.h"
#include "watch/forced_unwind.h"
#include "watch/notice.h"
#include "watch/stall_verdict.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

using Clock = StallWatch::Clock;
using std::chrono::milliseconds;

/// State of the process. Never destroyed, since store threads are not joined.
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

constexpr milliseconds kDefaultTime{10000};

/// In milliseconds. A value that is not a number is reported and replaced by the default; a
/// negative value turns verdicts off, like 0.
int64_t read_stall_time() {
  constexpr double kLeast = 0.1, kMost = 1e6;
  const char* const given = std::getenv("APEX_STALL_SECONDS");
  if (given == nullptr || *given == '\0') return kDefaultTime.count();
  std::istringstream in(given);
  in.imbue(std::locale::classic());
  double seconds = 0;
  if (!(in >> seconds) || !(in >> std::ws).eof() || !std::isfinite(seconds)) {
    notify("APEX_STALL_SECONDS=" + std::string(given) +
           " is not a number of seconds: the default of 10 is used; 0 disables stall reports");
    return kDefaultTime.count();
  }
  return seconds <= 0 ? 0 : static_cast<int64_t>(1000 * std::clamp(seconds, kLeast, kMost));
}

std::atomic<int64_t>& stall_ms() {
  static std::atomic<int64_t> time = read_stall_time();
  return time;
}

/// The stall time of this group.
milliseconds limit_of(const WatchedGroup& group) {
  return group.timeout > milliseconds(0) ? std::min(milliseconds(stall_ms()), group.timeout / 3)
                                         : milliseconds(stall_ms());
}

/// Poll interval of a group. At most that of the default stall time, also if this rank's own
/// verdicts are off, so that it answers in time for other ranks' verdicts.
milliseconds between_answers(const WatchedGroup& group) {
  const milliseconds limit = limit_of(group);
  return timing::between_answers(limit > milliseconds(0) ? std::min(limit, kDefaultTime)
                                                         : kDefaultTime);
}

/// A group and the groups made from it share this board.
std::string key_of(WatchedGroup& group, c10d::Store& store) {
  return group.root()->key(store, "stall");
}

/// Key of the last printed verdict. Shared, because ranks that wait in several of these groups may
/// wait for the same rank.
std::string key_of_said(WatchedGroup& group, c10d::Store& store) {
  return key_of(group, store) + "/said";
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
      // The reader has no further facts.
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
  const WatchedGroupPtr root = group.root();
  for (const WatchedGroupPtr& one : all_watched()) {
    if (one->root() == root) at.reached[one->label()] = one->calls.last_number();
  }
  return at;
}

/// The position of the rank of `asked`: the group in which it waits, or else its latest call.
Whereabouts latest_of(const WatchedGroup& asked) {
  Whereabouts latest;
  for (const WatchedGroupPtr& group : all_watched()) {
    // Skips other ranks of the group if ranks are threads of one process.
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

/// One key per rank: its earlier posts are obsolete.
std::string key_of_rank(WatchedGroup& group, c10d::Store& store, int rank) {
  return key_of(group, store) + '/' + std::to_string(rank);
}

void post(c10d::Store& store, WatchedGroup& group, const Whereabouts& at) {
  const std::string text = at.encode();
  store.set(key_of_rank(group, store, group.rank), std::vector<uint8_t>(text.begin(), text.end()));
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

/// Polls, and answers if a rank is waiting. Returns how often ranks had asked.
int64_t look_and_answer(WatchedGroup& group, c10d::Store& store, int64_t seen) {
  const int64_t asked = count_of(store, key_of(group, store) + "/asked");
  if (asked == seen) return asked;
  Whereabouts at = latest_of(group);
  at.asked = asked;
  post(store, group, at);
  group.reported_elsewhere = !at.waits;
  return asked;
}

/// The wait of a group's GPU. Used on the store's thread.
struct GpuWait {
  c10::intrusive_ptr<c10d::Work> work;  ///< the last launched one when the wait began
  std::optional<StallWatch> stall;

  void poll(const WatchedGroupPtr& group) {
    if (work && !distributed::has_completed(*work)) return stall->poll();
    stall.reset();
    Launched last;
    {
      const std::lock_guard<std::mutex> lock(group->mutex);
      last = std::exchange(group->launched, {});
    }
    work = last.work;
    if (work) stall.emplace(group, last);
  }
};

/// Reschedules itself; stops with the group or the store.
void answer(const std::weak_ptr<WatchedGroup>& weak, int64_t seen,
            const std::shared_ptr<GpuWait>& gpu) {
  const WatchedGroupPtr group = weak.lock();
  if (!group) return;
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    if (stalls().ended) return;
    ++stalls().answering;
  }
  bool goes_on = true;
  try {
    gpu->poll(group);
    // An exited process may have hosted the store, and torch logs every call to a lost store.
    if (look_around(*group, ProcessState::kEnded).empty())
      group->store->run([&](c10d::Store& store) { seen = look_and_answer(*group, store, seen); });
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    goes_on = group->store->is_there();  // the store may become reachable again
  }
  if (goes_on) {
    group->store->thread().run([weak, seen, gpu] { answer(weak, seen, gpu); },
                               Clock::now() + between_answers(*group));
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
  group->store->thread().run(
      [weak = std::weak_ptr<WatchedGroup>(group)] { answer(weak, 0, std::make_shared<GpuWait>()); },
      Clock::now() + between_answers(*group));
}

void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept try {
  const WatchedGroupPtr one = find_watched(group);
  if (!one || distributed::is_capturing()) return;
  Launched before{work, one->calls.last_number(), what};
  const std::lock_guard<std::mutex> lock(one->mutex);
  std::swap(one->launched, before);
} catch (...) {
  // A stall of this call is not reported.
}

/// State of a wait on the store's thread, which may outlive the wait.
struct StallWatch::Waiting {
  Waiting(WatchedGroupPtr of, int64_t number, std::string name = {}, bool device = false)
      : group(std::move(of)), call(number), what(std::move(name)), on_device(device) {}

  const WatchedGroupPtr group;
  const int64_t call;
  const std::string what;  ///< of a GPU wait
  const bool on_device;
  const Clock::time_point since = Clock::now() - timing::kUsual;
  std::atomic<bool> over{false};
  std::atomic<bool> alone{false};      ///< it was printed that the store does not answer
  std::optional<int64_t> said_before;  ///< number of printed verdicts when this rank asked first

  void ask(c10d::Store& store, Round& round);
  void speak(c10d::Store& store, const Round& round);
  void take_over(const Said& said) const;
  Stall stall() const;
  void print(const std::string& verdict) const;
};

/// This rank's view, without the others' posts.
Stall StallWatch::Waiting::stall() const {
  Stall stall;
  stall.rank = group->rank;
  stall.size = group->size;
  stall.mine = whereabouts(*group, !on_device);
  stall.on_device = on_device;
  if (on_device) {
    stall.mine.call = call;
    stall.mine.what = what;
    stall.mine.seconds = seconds_since(since);
  }
  stall.processes = look_around(*group);
  stall.note = group->note;
  const double timeout = std::chrono::duration<double>(group->timeout).count();
  stall.seconds_left = timeout > 0 ? std::max(0.0, timeout - stall.mine.seconds) : -1;
  return stall;
}

void StallWatch::Waiting::print(const std::string& verdict) const {
  notify(verdict);
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    stalls().last_verdict = verdict;
  }
  const std::lock_guard<std::mutex> lock(group->mutex);
  group->stall = verdict;
  group->stalled = true;
}

void StallWatch::Waiting::ask(c10d::Store& store, Round& round) {
  if (!on_device) parallel::post(store, *group, whereabouts(*group, true));
  round.said = get_or_empty(store, key_of_said(*group, store));
  const Said said = Said::decode(round.said);
  if (!said_before) said_before = said.times;
  take_over(said);
  round.asked = store.add(key_of(*group, store) + "/asked", 1);
  round.asked_at = Clock::now();
}

/// Adds the verdict to this rank's own error.
void StallWatch::Waiting::take_over(const Said& said) const {
  if (over || said.times <= *said_before || said.verdict.empty()) return;
  const std::lock_guard<std::mutex> lock(group->mutex);
  group->stall = said.verdict;
  group->stalled = true;
}

void StallWatch::Waiting::speak(c10d::Store& store, const Round& round) {
  if (over || alone || round.asked == 0) return;  // the question did not reach the store
  // The store has answered late, so other ranks had no time to answer.
  if (Clock::now() - round.asked_at < timing::until_answered(limit_of(*group))) return;
  const std::string key = key_of_said(*group, store);
  const Said before = Said::decode(round.said);
  Said said{before.times + 1, group->rank, before.group, before.call, before.signature, {}};
  const std::string there = compare_set(store, key, round.said, said.encode());
  if (there != said.encode()) return take_over(Said::decode(there));
  Stall now = stall();
  now.mine.asked = round.asked;
  for (int rank = 0; rank < group->size; ++rank) {
    const std::string text = get_or_empty(store, key_of_rank(*group, store, rank));
    if (!text.empty()) now.others[rank] = Whereabouts::decode(text);
  }
  said.signature = signature(now);
  said.verdict = before.verdict;
  if (over || !is_stall(now)) {
    said.signature = before.signature;
  } else if (said.signature != before.signature) {
    said.group = group->label();
    said.call = on_device ? 0 : call;
    said.verdict = describe(now);
    print(said.verdict);
  }
  const std::string text = said.encode();
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

std::string latest_verdict(const WatchedGroupPtr& group) {
  const auto said = std::make_shared<Said>();
  const bool answers = group->store->call(
      [group, said](c10d::Store& store) {
        *said = Said::decode(get_or_empty(store, key_of_said(*group, store)));
      },
      Clock::now() + timing::kForOthers);
  const bool of_this_call =
      answers && said->group == group->label() && said->call == group->calls.last_number();
  return of_this_call ? said->verdict : std::string();
}

StallWatch::StallWatch(const WatchedGroupPtr& group)
    : StallWatch(std::make_shared<Waiting>(group, group->calls.last_number())) {
  group->waits_since = waiting_->since;
  ++group->waits;
  if (group->stalled.exchange(false)) {  // from an earlier wait in the same call
    const std::lock_guard<std::mutex> lock(group->mutex);
    group->stall.clear();
  }
}

StallWatch::StallWatch(const WatchedGroupPtr& group, const Launched& launched)
    : StallWatch(std::make_shared<Waiting>(group, launched.number, launched.what, true)) {}

StallWatch::StallWatch(std::shared_ptr<Waiting> waiting)
    : waiting_(std::move(waiting)),
      limit_(limit_of(*waiting_->group)),
      due_(std::max(limit_, timing::kUsual + limit_ - timing::until_asked(limit_))) {}

StallWatch::~StallWatch() {
  waiting_->over = true;
  if (waiting_->on_device) return;
  --waiting_->group->waits;
  if (posted_) post(false);
}

void StallWatch::post(bool waits) {
  waiting_->group->store->post([group = waiting_->group, waits](c10d::Store& store) {
    parallel::post(store, *group, whereabouts(*group, waits));
  });
}

/// Another rank waits, and this rank has answered that it does not wait; correct that.
void StallWatch::correct() {
  if (posted_) return;
  if (!waiting_->group->root()->reported_elsewhere.exchange(false)) return;
  posted_ = true;
  post(!waiting_->on_device);
}

void StallWatch::poll() {
  correct();
  if (limit_ == milliseconds(0)) return;
  StoreClient& store = *waiting_->group->store;
  const auto waited = Clock::now() - waiting_->since;
  if (!round_ && waited >= due_ - (limit_ - timing::until_asked(limit_))) {
    posted_ = true;
    round_ = std::make_shared<Round>();
    store.post([waiting = waiting_, round = round_](c10d::Store& shared) {
      waiting->ask(shared, *round);
    });
  }
  if (round_ && !verdict_.valid() && waited >= due_) {
    verdict_ = store.post([waiting = waiting_, round = round_](c10d::Store& shared) {
      waiting->speak(shared, *round);
    });
  }
  const bool done =
      verdict_.valid() && verdict_.wait_for(milliseconds(0)) == std::future_status::ready;
  if (done) {  // repeat later: the cause may have changed
    due_ *= 2;
    round_.reset();
    verdict_ = {};
    return;
  }
  // A GPU may just be busy, so without other ranks' answers there is no verdict.
  const bool late = !waiting_->on_device && verdict_.valid() &&
                    waited >= due_ + timing::until_alone(limit_) - limit_;
  if (!late || waiting_->alone.exchange(true)) return;
  Stall stall = waiting_->stall();
  stall.store_answers = false;
  waiting_->print(describe(stall));
}

}  // namespace apex::parallel
