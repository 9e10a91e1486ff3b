// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distributed/backends.h"
#include "error_text.h"
#include "watch/neighbours.h"
#include "watch/stall.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The stall time of a group. Without reports, ranks in different collectives are still found.
milliseconds limit_of(const Board& board) {
  const milliseconds limit = reports_stalls() ? stall_time() : kDefaultStallTime;
  return board.timeout > milliseconds(0) ? std::min(limit, board.timeout / 3) : limit;
}

std::string key_of_verdict(const WatchedGroup& group, int64_t call) {
  return group.board->key("stall") + '/' + group.channel + '/' + std::to_string(call);
}

/// This rank's view, without the others' reports.
Stall view_of(WatchedGroup& group) {
  Board& board = *group.board;
  Stall stall;
  stall.rank = board.rank;
  stall.size = board.size;
  stall.mine = position_in(group);
  stall.processes = board.look_around();
  stall.note = group.note;
  const double timeout = std::chrono::duration<double>(board.timeout).count();
  stall.seconds_left = timeout > 0 ? std::max(0.0, timeout - stall.mine.seconds) : -1;
  return stall;
}

}  // namespace

// --- a wait of a thread ---

Wait::Wait(const c10d::ProcessGroup& group, const std::string& name, bool connects)
    : what(name), group_(find_watched(group)), connects_(connects) {
  if (!group_) return;
  {
    const std::lock_guard<std::mutex> lock(group_->mutex);
    group_->waits.push_back(this);
  }
  report_ended_processes();
}

Wait::~Wait() {
  if (!group_) return;
  const std::lock_guard<std::mutex> lock(group_->mutex);
  auto& waits = group_->waits;
  waits.erase(std::find(waits.begin(), waits.end(), this));
}

milliseconds Wait::before_polls() const {
  return group_ && group_->board->said_elsewhere ? timing::kLook : timing::kUsual;
}

std::string Wait::poll() {
  if (!group_) return {};
  Board& board = *group_->board;
  if (board.said_elsewhere.exchange(false))  // another rank waits
    board.post([&board](c10d::Store& store) { board.publish(store); });
  board.look_if_older(timing::between_looks(board.size));
  // What was read may be from before the wait.
  if (board.answered_since(since) && !board.reports().empty())
    return "another rank reports that a collective of this group has failed";
  {
    const std::lock_guard<std::mutex> lock(group_->mutex);
    if (!group_->difference.empty())
      return "the ranks are in different collectives: " + group_->difference;
  }
  report_alone();
  return lost_process();
}

/// See Note [When the store is lost].
std::string Wait::lost_process() {
  Board& board = *group_->board;
  const auto now = Clock::now();
  if (now < look_at_) return {};
  look_at_ = now + timing::kNeighbours;
  if (ended_at_ == Clock::time_point()) {
    if (board.look_around(ProcessState::kEnded).empty()) return {};
    ended_at_ = now;
  }
  const bool alone = connects_ || (board.has_store && !board.answered_since(ended_at_));
  return alone && now - ended_at_ > (connects_ ? timing::kOnTheWay : timing::kAlone)
             ? "a process of this group has ended"
             : "";
}

/// Reports a stall from this thread, if the store blocks the board's thread.
void Wait::report_alone() {
  if (!reports_stalls()) return;
  Board& board = *group_->board;
  const auto now = Clock::now();
  const milliseconds limit = limit_of(board);
  const auto silence = timing::until_alone(limit) + timing::between_looks(board.size);
  if (now - since < next_report_ * (timing::until_asked(limit) + silence) ||
      board.answered_since(now - silence))
    return;
  next_report_ *= 4;
  Stall stall = view_of(*group_);
  stall.store_answers = false;
  print_report(describe(stall));
}

// --- the board's thread ---

namespace {

struct Watched {
  Clock::time_point since;
  int64_t call = 0;
  std::string what;
  bool on_device = false;
};

/// The wait of this rank's host in its last call, or else of its GPU.
std::optional<Watched> find_wait(WatchedGroup& group) {
  if (group.on_gpu.work && distributed::has_completed(*group.on_gpu.work)) group.on_gpu = {};
  const std::lock_guard<std::mutex> lock(group.mutex);
  if (!group.waits.empty()) {
    const int64_t call = group.calls.number;
    return Watched{group.waits.front()->since, call, group.calls.name_of(call)};
  }
  if (!group.on_gpu.work) {
    group.on_gpu = std::exchange(group.launched, {});
    group.on_gpu_since = Clock::now();
  }
  if (!group.on_gpu.work) return std::nullopt;
  return Watched{group.on_gpu_since, group.on_gpu.number, group.on_gpu.what, true};
}

void report(WatchedGroup& group, const Watched& wait, c10d::Store& store) {
  Board& board = *group.board;
  Stall stall = view_of(group);
  stall.on_device = wait.on_device;
  stall.mine.asked = group.number_of_question;
  stall.mine.call = wait.call;
  stall.mine.what = wait.what;
  stall.mine.seconds = std::chrono::duration<double>(Clock::now() - wait.since).count();
  const std::string key = key_of_verdict(group, wait.call);
  const std::string round = key + '/' + std::to_string(group.due.count());
  const std::string me = std::to_string(board.rank);
  for (int next = 1; next < board.size; ++next) {
    const int rank = (board.rank + next) % board.size;
    if (const std::string text = get_or_empty(store, board.key_of(rank)); !text.empty()) {
      const RankRecord& other = stall.others[rank] = RankRecord::decode(text);
      std::string difference =
          wait.on_device ? std::string() : apart(board.rank, stall.mine, rank, other);
      if (!difference.empty()) {
        const std::lock_guard<std::mutex> lock(group.mutex);
        group.difference = std::move(difference);
        return;
      }
    }
    if (next == 1 && store.compareSet(round, std::string(), me) != me) return;
  }
  const auto now = find_wait(group);
  if (!reports_stalls() || !is_stall(stall) || !now || now->since != wait.since) return;
  const std::string verdict = describe(stall);
  store.set(key, verdict);
  print_report(verdict);
}

void watch_wait(WatchedGroup& group, c10d::Store& store) {
  const std::optional<Watched> wait = find_wait(group);
  if (!wait) return;
  Board& board = *group.board;
  const milliseconds limit = limit_of(board);
  if (wait->since != group.since) {
    group.since = wait->since;
    group.due = limit;
    group.number_of_question = 0;
  }
  const auto waited = Clock::now() - wait->since;
  const auto ask_at = group.due - (limit - timing::until_asked(limit));
  if (waited < ask_at) return;
  if (group.number_of_question == 0) {
    group.number_of_question = board.ask(store);
    const std::lock_guard<std::mutex> lock(group.mutex);
    group.asked = true;
  }
  // Ranks of other hosts answer later, but before the wait ends.
  const milliseconds report_at =
      board.all_on_this_host()
          ? group.due
          : std::max(group.due, std::min(ask_at + timing::kAllAnswered, 2 * group.due));
  if (waited < report_at) return;
  report(group, *wait, store);
  group.due *= 4;  // the cause may have changed
  group.number_of_question = 0;
}

}  // namespace

void watch_waits(Board& board, c10d::Store& store) {
  for (const WatchedGroupPtr& group : all_watched()) {
    if (group->board.get() == &board) watch_wait(*group, store);
  }
}

milliseconds between_gpu_looks(const Board& board) {
  return timing::between_gpu_looks(std::min(limit_of(board), kDefaultStallTime));
}

void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept try {
  const WatchedGroupPtr one = find_watched(group);
  if (!one || !one->board->has_store || distributed::is_capturing()) return;
  Launched before;
  {
    const std::lock_guard<std::mutex> lock(one->mutex);
    before = std::exchange(one->launched, {work, one->calls.number, what});
  }
  one->board->watch_gpus();
} catch (...) {
  // A stall of this call is not reported.
}

std::string stall_verdict(const c10d::ProcessGroup& given) {
  const WatchedGroupPtr group = find_watched(given);
  if (!group) return {};
  int64_t call = 0;
  {
    const std::lock_guard<std::mutex> lock(group->mutex);
    if (!group->asked) return {};
    call = group->calls.number;
  }
  const auto text = std::make_shared<std::string>();
  const auto done = group->board->post([group, call, text](c10d::Store& store) {
    *text = get_or_empty(store, key_of_verdict(*group, call));
  });
  return done.wait_for(timing::kForOthers) == std::future_status::ready ? *text : std::string();
}

// --- the error of a failed collective ---

namespace {

/// Reports the failure and collects other ranks' reports, until the state of every rank is known or
/// patience ends. Returns whether the store answers.
bool collect(Board& board, const std::string& what, const std::string& cause, Findings& findings) {
  const auto began = Clock::now();
  auto until = began + (board.has_store ? board.patience : timing::kForOthers);
  Proof told = board.look_around(), first = told;
  board.report(what, cause, told);  // first, since other ranks may be waiting for this rank
  for (;; board.wait_for_news(std::min(until, Clock::now() + timing::kLook))) {
    // Before the reports are read: a rank may exit after it has reported.
    const auto seen_at = Clock::now();
    const Proof seen = board.look_around();
    if (seen.size() > told.size()) board.report(what, cause, told = seen);
    board.look_if_older(timing::while_collecting(board.size));
    while (!board.answered_since(seen_at) && !board.failed_since(began) && Clock::now() < until) {
      if (first.empty()) first = board.look_around();
      if (!first.empty()) until = std::min(until, Clock::now() + timing::kForOthers);
      board.wait_for_news(std::min(until, Clock::now() + timing::kLook));
    }
    // What was read may be from before the failure.
    const bool answered = board.answered_since(began);
    if (answered) findings = dead(board.reports(), board.rank);
    if (board.answered_since(seen_at)) {
      for (const auto& [rank, state] : seen) {
        if (findings.reports.count(rank) == 0) findings.proof.emplace(rank, state);
      }
    }
    const auto now = Clock::now();
    if (!findings.proof.empty() || board.failed_since(began))
      until = std::min(until, now + timing::kAfterProof);
    const bool all = static_cast<int>(findings.reports.size()) == board.size - 1;
    if (!all && now < until) continue;
    // If the store has not answered since, what was seen first: later, ranks that have given up
    // also exit.
    for (const auto& [rank, state] : first) {
      if (findings.reports.count(rank) == 0) findings.proof.emplace(rank, state);
    }
    return answered;
  }
}

std::string describe(const Findings& findings, Board& board, const std::string& what,
                     const std::string& cause, bool store_answers) {
  std::string text;
  for (const auto& [rank, state] : findings.proof)
    text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!board.has_store) return text;
  if (!store_answers) {
    return text +
           "; the store, through which ranks report, does not answer: the process that holds it, "
           "usually rank 0 or the launcher, has ended, is stopped, or cannot be reached";
  }
  if (!findings.proof.empty()) return text;
  std::vector<int> silent;
  for (int rank = 0; rank < board.size; ++rank) {
    if (rank != board.rank && findings.reports.count(rank) == 0) silent.push_back(rank);
  }
  if (!silent.empty()) {
    text += "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") +
            " not reported this failure within " + std::to_string(board.patience.count()) +
            " ms: stopped, unreachable, or did not reach this collective";
  } else {
    text += "; every rank has reported this failure";
    if (board.look_around(ProcessState::kEnded).empty()) text += ", and none has ended";
  }
  for (const auto& [rank, other] : findings.reports) {
    // If a hook fails in the same call on several ranks, a silent rank is the reason.
    const bool same_call = in_common(other.failure) == in_common(what);
    if (same_call &&
        (other.cause == cause || other.cause.empty() || (!cause.empty() && !silent.empty())))
      continue;
    text += "; rank " + std::to_string(rank) + " failed in " + other.failure +
            (other.cause.empty() ? "" : ": " + other.cause);
  }
  return text;
}

}  // namespace

std::string report_failure(const c10d::ProcessGroup& group, const std::string& what,
                           const std::string& cause) noexcept try {
  const WatchedGroupPtr known = watched(group);
  if (!known) return {};
  Board& board = *known->board;
  const std::lock_guard<std::mutex> lock(board.verdict_mutex);
  if (!board.verdict) {
    Findings findings;
    const bool answers = collect(board, what, cause, findings);
    board.verdict = describe(findings, board, what, cause, answers);
  }
  return *board.verdict;
} catch (...) {
  return {};
}

}  // namespace apex::parallel
