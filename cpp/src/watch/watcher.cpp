// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "distributed/backends.h"
#include "watch/stall.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The stall time of a group; 0: no reports.
milliseconds limit_of(const Board& board) {
  return board.timeout > milliseconds(0) ? std::min(stall_time(), board.timeout / 3) : stall_time();
}

/// Without reports, ranks in different collectives are still found.
milliseconds time_of_questions(const Board& board) {
  const milliseconds limit = limit_of(board);
  return limit > milliseconds(0) ? limit : kDefaultStallTime;
}

int64_t last_call(WatchedGroup& group) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  return group.calls.number;
}

/// One key per rank: its earlier reports are obsolete.
std::string key_of(const Board& board, int rank) {
  return board.key("rank") + '/' + std::to_string(rank);
}

std::string key_of_verdict(const WatchedGroup& group, int64_t call) {
  return group.board->key("stall") + '/' + group.channel + '/' + std::to_string(call);
}

void post_position(c10d::Store& store, WatchedGroup& group, bool waits) {
  store.set(key_of(*group.board, group.board->rank), position_in(group, waits).encode());
}

}  // namespace

/// Functions that take the store run on its thread.
struct Wait::State : std::enable_shared_from_this<Wait::State> {
  using Step = void (State::*)(c10d::Store&);

  State(WatchedGroupPtr of, const Launched* launched)
      : group(std::move(of)),
        board(*group->board),
        on_device(launched != nullptr),
        call(on_device ? launched->number : last_call(*group)),
        what(on_device ? launched->what : std::string()),
        since(began - (on_device ? milliseconds(0) : timing::kUsual)),
        limit(time_of_questions(board)),
        due(std::max(limit, timing::kUsual + limit - timing::until_asked(limit))) {}

  std::string poll();
  void watch_stall();
  bool is_left_alone();
  void end();
  /// Calls `step` on the store's thread unless the wait is over.
  void post(Step step);
  /// Reports whether this rank waits.
  void post_position(bool waits);
  void ask(c10d::Store& store);
  void compare(c10d::Store& store);
  void report(c10d::Store& store);
  bool differs(int rank, const RankRecord& theirs);
  Stall stall() const;

  const WatchedGroupPtr group;
  Board& board;
  const bool on_device;
  const int64_t call;
  const std::string what;  ///< of a GPU wait
  const Clock::time_point began = Clock::now(), since;
  const milliseconds limit;
  milliseconds due;                     ///< time from `since` to the next report
  size_t steps = 0;                     ///< posted before that
  Clock::time_point look_at, ended_at;  ///< see is_left_alone()
  bool posted = false;                  ///< other ranks know that this rank waits
  std::atomic<bool> over{false};
  std::atomic<bool> read{false};  ///< the store has answered what is read when a report is due
  int64_t asked = 0;              ///< how often ranks had asked; used on the store's thread
  int round = 0;

  std::mutex mutex;  ///< guards the rest
  std::string difference;
};

Wait::Wait(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr known = find_watched(group);
  if (!known) return;
  state_ = std::make_shared<State>(known, nullptr);
  known->board->look_now();
  known->waits_since = state_->since;
  ++known->waits;
}

Wait::Wait(const WatchedGroupPtr& group, const Launched& launched)
    : state_(std::make_shared<State>(group, &launched)) {}

Wait::~Wait() {
  if (state_) state_->end();
}

std::string Wait::poll() { return state_ ? state_->poll() : std::string(); }

void Wait::State::end() {
  over = true;
  if (on_device) return;
  --group->waits;
  if (posted) post_position(false);
}

std::string Wait::State::poll() {
  watch_stall();
  if (on_device) return {};
  board.look_if_older(timing::between_looks(board.size));
  // What was read may be from before the wait.
  if (board.answered_since(began) && !board.reports().empty())
    return "another rank reports that a collective of this group has failed";
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!difference.empty()) return "the ranks are in different collectives: " + difference;
  }
  if (is_left_alone()) return "a process of this group has ended, and the store is lost";
  return {};
}

/// See Note [When the store is lost].
bool Wait::State::is_left_alone() {
  const auto now = Clock::now();
  if (!board.has_store() || now < look_at) return false;
  look_at = now + timing::kNeighbours;
  if (ended_at == Clock::time_point()) {
    if (board.look_around(ProcessState::kEnded).empty()) return false;
    ended_at = now;
  }
  return now - ended_at > timing::kAlone && !board.answered_since(ended_at);
}

void Wait::State::watch_stall() {
  // Another rank waits, and this rank has reported that it does not.
  if (!on_device && board.answered_elsewhere.exchange(false)) {
    posted = true;
    post_position(true);
  }
  const auto waited = Clock::now() - since;
  const auto ask_at = due - (limit - timing::until_asked(limit));
  // Ranks of other hosts answer later, but before the wait ends.
  const auto report_at = board.all_on_this_host()
                             ? due
                             : std::max(due, std::min(ask_at + timing::kAllAnswered, 2 * due));
  const std::array<std::pair<milliseconds, Step>, 3> plan{
      {{ask_at, &State::ask},
       {ask_at + timing::until_compared(limit), &State::compare},
       {report_at, &State::report}}};
  while (steps < plan.size() && waited >= plan[steps].first) {
    posted = true;
    post(plan[steps++].second);
  }
  if (read.exchange(false)) {  // repeat later: the cause may have changed
    due *= 4;
    steps = 0;
  } else if (steps == plan.size() && !on_device && limit_of(board) > milliseconds(0) &&
             waited >= report_at + timing::until_alone(limit) - limit) {
    // A GPU may just be busy, so without other ranks' answers there is no report.
    Stall alone = stall();
    alone.store_answers = false;
    print_report(describe(alone));
    due *= 4;
    --steps;
  }
}

void Wait::State::post(Step step) {
  board.post([self = shared_from_this(), step](c10d::Store& store) {
    if (!self->over) (self.get()->*step)(store);
  });
}

void Wait::State::post_position(bool waits) {
  board.post([group = group, waits](c10d::Store& store) {
    parallel::post_position(store, *group, waits);
  });
}

/// This rank's view, without the others' reports.
Stall Wait::State::stall() const {
  Stall stall;
  stall.rank = board.rank;
  stall.size = board.size;
  stall.mine = position_in(*group, !on_device);
  stall.on_device = on_device;
  if (on_device) {
    stall.mine.call = call;
    stall.mine.what = what;
    stall.mine.seconds = std::chrono::duration<double>(Clock::now() - since).count();
  }
  stall.mine.asked = asked;
  stall.processes = board.look_around();
  stall.note = group->note;
  const double timeout = std::chrono::duration<double>(board.timeout).count();
  stall.seconds_left = timeout > 0 ? std::max(0.0, timeout - stall.mine.seconds) : -1;
  return stall;
}

void Wait::State::ask(c10d::Store& store) {
  if (!on_device) parallel::post_position(store, *group, true);
  asked = store.add(board.key("asked"), 1);
  store.add(board.key("news"), 1);
  group->asked = true;
  board.find_processes(store);
  board.wake();
}

bool Wait::State::differs(int rank, const RankRecord& theirs) {
  std::string found = apart(board.rank, position_in(*group, true), rank, theirs);
  const std::lock_guard<std::mutex> lock(mutex);
  difference = std::move(found);
  return !difference.empty();
}

/// Compares this rank's calls with one other rank's: together the ranks compare all.
void Wait::State::compare(c10d::Store& store) {
  const int next = (board.rank + 1) % board.size;
  const std::string text = on_device ? std::string() : get_or_empty(store, key_of(board, next));
  if (!text.empty()) differs(next, RankRecord::decode(text));
}

void Wait::State::report(c10d::Store& store) {
  const std::string key = key_of_verdict(*group, call);
  const std::string me = std::to_string(board.rank);
  const std::string first =
      store.compareSet(key + '/' + std::to_string(round++), std::string(), me);
  read = true;
  if (first != me) return;
  Stall now = stall();
  for (int rank = 0; rank < board.size; ++rank) {
    if (rank == board.rank) continue;
    const std::string text = get_or_empty(store, key_of(board, rank));
    if (text.empty()) continue;
    now.others[rank] = RankRecord::decode(text);
    if (!on_device && differs(rank, now.others[rank])) return;
  }
  if (over || limit_of(board) == milliseconds(0) || !is_stall(now)) return;
  const std::string verdict = describe(now);
  store.set(key, verdict);
  print_report(verdict);
}

std::string stall_verdict(const c10d::ProcessGroup& given) {
  const WatchedGroupPtr group = find_watched(given);
  if (!group || !group->asked) return {};
  const auto text = std::make_shared<std::string>();
  const auto done = group->board->post([group, call = last_call(*group), text](c10d::Store& store) {
    *text = get_or_empty(store, key_of_verdict(*group, call));
  });
  return done.wait_for(timing::kForOthers) == std::future_status::ready ? *text : std::string();
}

// --- GPUs ---

namespace {

/// The wait of a group's GPU. Used on the store's thread.
struct GpuWait {
  c10::intrusive_ptr<c10d::Work> work;  ///< the last launched one when the wait began
  std::optional<Wait> wait;

  void poll(const WatchedGroupPtr& group) {
    if (work && !distributed::has_completed(*work)) return static_cast<void>(wait->poll());
    wait.reset();
    Launched last;
    {
      const std::lock_guard<std::mutex> lock(group->mutex);
      last = std::exchange(group->launched, {});
    }
    work = last.work;
    if (work) wait.emplace(group, last);
  }
};

/// Looks again and again while the group exists.
void watch_gpu(const std::weak_ptr<WatchedGroup>& weak, const std::shared_ptr<GpuWait>& gpu) {
  const WatchedGroupPtr group = weak.lock();
  if (!group) return;
  gpu->poll(group);
  const auto pause =
      timing::between_gpu_looks(std::min(time_of_questions(*group->board), kDefaultStallTime));
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
  if (first) watch_gpu(one, std::make_shared<GpuWait>());
} catch (...) {
  // A stall of this call is not reported.
}

}  // namespace apex::parallel
