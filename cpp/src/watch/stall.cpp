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
#include "watch/record.h"
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

/// 0: no reports are printed, but ranks in different collectives are found.
milliseconds time_of_questions(const WatchedGroup& group) {
  const milliseconds limit = limit_of(group);
  return limit > milliseconds(0) ? limit : kDefaultTime;
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

/// Fills in the position of `group`.
void set_position(RankRecord& record, WatchedGroup& group, bool waits) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  record.channel = group.channel;
  record.call = group.calls.number;
  record.what = group.calls.name_of(group.calls.number);
  record.waits = waits;
  record.seconds =
      record.call == 0 ? 0 : seconds_since(waits ? group.waits_since.load() : group.began);
}

int64_t last_call(WatchedGroup& group) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  return group.calls.number;
}

std::map<std::string, CallLog> calls_of(const Board& board) {
  std::map<std::string, CallLog> calls;
  for (const WatchedGroupPtr& group : all_watched()) {
    if (group->board.get() != &board) continue;
    const std::lock_guard<std::mutex> lock(group->mutex);
    calls[group->channel] = group->calls;
  }
  return calls;
}

/// One key per rank: its earlier reports are obsolete.
std::string key_of(const Board& board, int rank) {
  return board.key("rank") + '/' + std::to_string(rank);
}

std::string key_of_verdict(const WatchedGroup& group, int64_t call) {
  return group.board->key("stall") + '/' + group.channel + '/' + std::to_string(call);
}

void post(c10d::Store& store, WatchedGroup& group, bool waits) {
  RankRecord record;
  set_position(record, group, waits);
  record.calls = calls_of(*group.board);
  set_text(store, key_of(*group.board, group.rank), record.encode());
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

RankRecord position(Board& board) {
  RankRecord latest;
  for (const WatchedGroupPtr& group : all_watched()) {
    // Skips other ranks of the group if ranks are threads of one process.
    if (group->board.get() != &board && group->board->group_name == board.group_name) continue;
    RankRecord at;
    set_position(at, *group, group->waits > 0);
    if (at.call != 0 && (latest.call == 0 || std::make_pair(!at.waits, at.seconds) <
                                                 std::make_pair(!latest.waits, latest.seconds)))
      latest = std::move(at);
  }
  latest.calls = calls_of(board);
  {
    const std::lock_guard<std::mutex> lock(stalls().mutex);
    if (stalls().ended) return latest;
    ++stalls().answering;
  }
  latest.state = read_state();
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  --stalls().answering;
  stalls().answered.notify_all();
  return latest;
}

void end_answers() {
  {
    std::unique_lock<std::mutex> lock(stalls().mutex);
    stalls().ended = true;
    stalls().answered.wait_for(lock, std::chrono::seconds(1),
                               [] { return stalls().answering == 0; });
  }
  stay_for_readers();
}

/// State of a wait on the store's thread, which may outlive the wait.
struct StallWatch::Waiting {
  Waiting(WatchedGroupPtr of, int64_t number, std::string name = {}, bool device = false)
      : group(std::move(of)), call(number), what(std::move(name)), on_device(device) {}

  const WatchedGroupPtr group;
  const int64_t call;
  const std::string what;  ///< of a GPU wait
  const bool on_device;
  const Clock::time_point since = Clock::now() - (on_device ? milliseconds(0) : timing::kUsual);
  std::atomic<bool> over{false}, posted{false};
  std::atomic<bool> read{false};  ///< the store has answered what is read when a report is due
  int64_t asked = 0;              ///< how often ranks had asked; used on the store's thread
  int round = 0;

  std::mutex mutex;  ///< guards the rest
  std::string difference;

  void ask(c10d::Store& store);
  void compare(c10d::Store& store);
  void report(c10d::Store& store);
  Stall stall() const;
  void print(const std::string& verdict) const;
  bool differs(int rank, const RankRecord& theirs);
  /// Calls `step` on the store's thread unless the wait is over.
  static void post(const std::shared_ptr<Waiting>& waiting, void (Waiting::*step)(c10d::Store&)) {
    waiting->group->board->post([waiting, step](c10d::Store& store) {
      if (!waiting->over) (waiting.get()->*step)(store);
    });
  }
};

/// This rank's view, without the others' reports.
Stall StallWatch::Waiting::stall() const {
  Stall stall;
  stall.rank = group->rank;
  stall.size = group->size;
  set_position(stall.mine, *group, !on_device);
  stall.mine.calls = calls_of(*group->board);
  stall.on_device = on_device;
  if (on_device) {
    stall.mine.call = call;
    stall.mine.what = what;
    stall.mine.seconds = seconds_since(since);
  }
  stall.mine.asked = asked;
  stall.processes = group->board->look_around();
  stall.note = group->note;
  const double timeout = std::chrono::duration<double>(group->timeout).count();
  stall.seconds_left = timeout > 0 ? std::max(0.0, timeout - stall.mine.seconds) : -1;
  return stall;
}

void StallWatch::Waiting::print(const std::string& verdict) const {
  notify(verdict);
  const std::lock_guard<std::mutex> lock(stalls().mutex);
  stalls().last_verdict = verdict;
}

void StallWatch::Waiting::ask(c10d::Store& store) {
  const Board& board = *group->board;
  if (!on_device) parallel::post(store, *group, true);
  asked = store.add(board.key("asked"), 1);
  store.add(board.key("news"), 1);
  group->asked = true;
  group->board->wake();
}

bool StallWatch::Waiting::differs(int rank, const RankRecord& theirs) {
  RankRecord mine;
  mine.calls = calls_of(*group->board);
  std::string found = apart(group->rank, mine, rank, theirs);
  const std::lock_guard<std::mutex> lock(mutex);
  difference = std::move(found);
  return !difference.empty();
}

/// Compares this rank's calls with one other rank's: together the ranks compare all.
void StallWatch::Waiting::compare(c10d::Store& store) {
  const int next = (group->rank + 1) % group->size;
  const std::string text = get_or_empty(store, key_of(*group->board, next));
  if (!text.empty()) differs(next, RankRecord::decode(text));
}

void StallWatch::Waiting::report(c10d::Store& store) {
  const std::string key = key_of_verdict(*group, call);
  const std::string me = std::to_string(group->rank);
  const std::string first = set_if_unset(store, key + '/' + std::to_string(round++), me);
  read = true;
  if (first != me) return;
  Stall now = stall();
  for (int rank = 0; rank < group->size; ++rank) {
    if (rank == group->rank) continue;
    const std::string text = get_or_empty(store, key_of(*group->board, rank));
    if (text.empty()) continue;
    now.others[rank] = RankRecord::decode(text);
    if (!on_device && differs(rank, now.others[rank])) return;
  }
  if (over || limit_of(*group) == milliseconds(0) || !is_stall(now)) return;
  const std::string verdict = describe(now);
  set_text(store, key, verdict);
  print(verdict);
}

std::string stall_verdict(const c10d::ProcessGroup& given) {
  const WatchedGroupPtr group = find_watched(given);
  if (!group || !group->asked) return {};
  const int64_t call = last_call(*group);
  const auto text = std::make_shared<std::string>();
  const auto done = group->board->post([group, call, text](c10d::Store& store) {
    *text = get_or_empty(store, key_of_verdict(*group, call));
  });
  return done.wait_for(timing::kForOthers) == std::future_status::ready ? *text : std::string();
}

StallWatch::StallWatch(const WatchedGroupPtr& group)
    : StallWatch(std::make_shared<Waiting>(group, last_call(*group))) {
  group->waits_since = waiting_->since;
  ++group->waits;
}

StallWatch::StallWatch(const WatchedGroupPtr& group, const Launched& launched)
    : StallWatch(std::make_shared<Waiting>(group, launched.number, launched.what, true)) {}

StallWatch::StallWatch(std::shared_ptr<Waiting> waiting)
    : waiting_(std::move(waiting)),
      limit_(time_of_questions(*waiting_->group)),
      due_(std::max(limit_, timing::kUsual + limit_ - timing::until_asked(limit_))) {}

StallWatch::~StallWatch() {
  waiting_->over = true;
  if (waiting_->on_device) return;
  --waiting_->group->waits;
  if (!waiting_->posted) return;
  waiting_->group->board->post(
      [group = waiting_->group](c10d::Store& store) { post(store, *group, false); });
}

std::string StallWatch::poll() {
  Board& board = *waiting_->group->board;
  const auto waited = Clock::now() - waiting_->since;
  const auto ask_at = due_ - (limit_ - timing::until_asked(limit_));
  const auto compare_at = ask_at + timing::until_compared(limit_);
  // Ranks of other hosts answer later, but before the wait ends.
  const auto report_at = board.all_on_this_host()
                             ? due_
                             : std::max(due_, std::min(ask_at + timing::kAllAnswered, 2 * due_));
  const auto once = [&](bool& done, milliseconds at, void (Waiting::*step)(c10d::Store&)) {
    if (done || waited < at) return;
    done = true;
    Waiting::post(waiting_, step);
  };
  // Another rank waits, and this rank has reported that it does not.
  if (!waiting_->on_device && board.answered_elsewhere.exchange(false)) {
    waiting_->posted = true;
    board.post(
        [group = waiting_->group](c10d::Store& store) { parallel::post(store, *group, true); });
  }
  if (!asked_ && waited >= ask_at) {
    waiting_->posted = true;
    if (!board.processes_read.exchange(true)) board.read_processes();  // to wake them
  }
  once(asked_, ask_at, &Waiting::ask);
  if (!waiting_->on_device) once(compared_, compare_at, &Waiting::compare);
  once(read_, report_at, &Waiting::report);
  if (waiting_->read.exchange(false)) {  // repeat later: the cause may have changed
    due_ *= 4;
    asked_ = compared_ = read_ = false;
  } else if (read_ && !waiting_->on_device && limit_of(*waiting_->group) > milliseconds(0) &&
             waited >= report_at + timing::until_alone(limit_) - limit_) {
    // A GPU may just be busy, so without other ranks' answers there is no report.
    Stall stall = waiting_->stall();
    stall.store_answers = false;
    waiting_->print(describe(stall));
    due_ *= 4;
    read_ = false;
  }
  const std::lock_guard<std::mutex> lock(waiting_->mutex);
  return waiting_->difference;
}

// --- GPUs ---

namespace {

/// The wait of a group's GPU. Used on the store's thread.
struct GpuWait {
  c10::intrusive_ptr<c10d::Work> work;  ///< the last launched one when the wait began
  std::optional<StallWatch> stall;

  void poll(const WatchedGroupPtr& group) {
    if (work && !distributed::has_completed(*work)) return static_cast<void>(stall->poll());
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

/// Looks again and again while the group exists.
void watch_gpu(const std::weak_ptr<WatchedGroup>& weak, const std::shared_ptr<GpuWait>& gpu) {
  const WatchedGroupPtr group = weak.lock();
  if (!group) return;
  gpu->poll(group);
  const auto pause = timing::between_gpu_looks(std::min(time_of_questions(*group), kDefaultTime));
  group->board->run_at(Clock::now() + pause, [weak, gpu] { watch_gpu(weak, gpu); });
}

}  // namespace

void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept try {
  const WatchedGroupPtr one = find_watched(group);
  if (!one || !one->board->has_store() || distributed::is_capturing()) return;
  Launched before;
  bool first = false;
  {
    const std::lock_guard<std::mutex> lock(one->mutex);
    first = !std::exchange(one->gpu_is_watched, true);
    before = std::exchange(one->launched, {work, one->calls.number, what});
  }
  if (first)
    one->board->run_at(Clock::now(), [weak = std::weak_ptr<WatchedGroup>(one)] {
      watch_gpu(weak, std::make_shared<GpuWait>());
    });
} catch (...) {
  // A stall of this call is not reported.
}

}  // namespace apex::parallel
