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

constexpr const char* kNoAnswer =
    "; the store, through which ranks report, does not answer: the process that holds it, usually "
    "rank 0 or the launcher, has ended, is stopped, or cannot be reached";

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

std::string Wait::poll() {
  if (!group_) return {};
  Board& board = *group_->board;
  board.look_if_older(timing::between_looks(board.size));
  if (!board.reports().empty())
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
  look_at_ = now + timing::kTick;
  if (ended_at_ == Clock::time_point()) {
    if (board.look_around(ProcessState::kEnded).empty()) return {};
    ended_at_ = now;
  }
  const bool alone = connects_ || (board.has_store && !board.answered_since(ended_at_));
  return alone && now - ended_at_ > (connects_ ? timing::kOnTheWay : timing::kAlone)
             ? "a process of this group has ended"
             : "";
}

/// Reports a stall from this thread, if the store has not answered for that long.
void Wait::report_alone() {
  Board& board = *group_->board;
  const auto now = Clock::now();
  const auto then = now - limit_of(board) - timing::between_looks(board.size);
  if (reported_ || !reports_stalls() || since > then || board.answered_since(then)) return;
  reported_ = true;
  std::string text = rank_of(board.rank, board.size) + " has waited for " +
                     std::to_string((now - since) / std::chrono::seconds(1)) + " s in: " + what;
  for (const auto& [rank, state] : board.look_around())
    text += "; rank " + std::to_string(rank) + ' ' + state;
  print_report(text + (board.has_store ? kNoAnswer : "") + group_->note);
}

// --- the watching thread ---

namespace {

/// The wait of this rank's host in its last call, or else of its GPU.
std::optional<Watched> find_wait(WatchedGroup& group) {
  if (group.on_gpu.work && distributed::has_completed(*group.on_gpu.work)) group.on_gpu = {};
  const std::lock_guard<std::mutex> lock(group.mutex);
  const CallLog& calls = group.calls;
  if (!group.waits.empty())
    return Watched{group.waits.front()->since, calls.number, calls.name_of(calls.number), nullptr};
  if (!group.on_gpu.work) {
    group.on_gpu = std::exchange(group.launched, {});
    group.on_gpu.since = Clock::now();
  }
  return group.on_gpu.work ? std::optional<Watched>(group.on_gpu) : std::nullopt;
}

void report(WatchedGroup& group, const Watched& wait) {
  Board& board = *group.board;
  Stall stall;
  stall.rank = board.rank;
  stall.size = board.size;
  stall.processes = board.look_around();
  stall.note = group.note;
  stall.mine = position_in(group);
  stall.on_device = wait.work != nullptr;
  stall.mine.asked = group.number_of_question;
  stall.mine.call = wait.call;
  stall.mine.what = wait.what;
  stall.mine.seconds = std::chrono::duration<double>(Clock::now() - wait.since).count();
  const double timeout = std::chrono::duration<double>(board.timeout).count();
  stall.seconds_left = timeout > 0 ? std::max(0.0, timeout - stall.mine.seconds) : -1;
  for (int rank = 0; rank < board.size; ++rank) {
    const auto other = rank == board.rank ? std::nullopt : board.position_of(rank);
    if (!other) continue;
    stall.others[rank] = *other;
    std::string difference =
        stall.on_device ? std::string() : apart(board.rank, stall.mine, rank, *other);
    if (!difference.empty()) {
      const std::lock_guard<std::mutex> lock(group.mutex);
      group.difference = std::move(difference);
      return;
    }
    if (rank < board.rank && waits_too(stall, rank)) return;  // it reports the stall
  }
  // A busy GPU looks like a waiting one, so it is stalled only if some rank is late.
  if (!reports_stalls() || (stall.on_device && late(stall).empty())) return;
  const auto now = find_wait(group);
  if (!now || now->since != wait.since) return;
  const std::string text = describe(stall);
  print_report(text);
  const std::lock_guard<std::mutex> lock(group.mutex);
  group.stall = text;
}

void watch_wait(WatchedGroup& group) {
  const std::optional<Watched> wait = find_wait(group);
  if (!wait) return;
  Board& board = *group.board;
  const milliseconds limit = limit_of(board);
  if (wait->since != group.since) {
    group.since = wait->since;
    group.due = limit;
    group.number_of_question = 0;
  }
  milliseconds until_answered = limit - timing::until_asked(limit);
  if (Clock::now() < wait->since + group.due - until_answered) return;
  if (group.number_of_question == 0) {
    group.number_of_question = board.ask();
    group.asked = Clock::now();  // the store may have been silent for long
  }
  // Ranks of other hosts, which are not woken, answer later, but before the wait ends.
  if (static_cast<int>(board.processes().size()) < board.size - 1)
    until_answered =
        std::max(until_answered, std::min(timing::kAllAnswered, group.due + until_answered));
  if (Clock::now() < group.asked + until_answered) return;
  report(group, *wait);
  group.due *= 4;  // the cause may have changed
  group.number_of_question = 0;
}

}  // namespace

void watch_waits(Board& board) {
  for (const WatchedGroupPtr& group : all_watched()) {
    if (group->board.get() == &board) watch_wait(*group);
  }
}

void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept try {
  const WatchedGroupPtr one = find_watched(group);
  if (!one || !one->board->has_store || distributed::is_capturing()) return;
  Watched launched{{}, 0, what, work};
  const std::lock_guard<std::mutex> lock(one->mutex);
  launched.call = one->calls.number;
  std::swap(one->launched, launched);  // an earlier one is destroyed after the lock is released
} catch (...) {
  // A stall of this call is not reported.
}

// --- the error of a failed collective ---

namespace {

/// Reports the failure and collects other ranks' reports, until the state of every rank is known or
/// patience ends. Returns whether the store answers.
bool collect(Board& board, RankRecord mine, Findings& findings) {
  const auto began = Clock::now();
  auto until = began + (board.has_store ? board.patience : timing::kForOthers);
  Proof first = board.look_around();
  mine.proof = first;
  board.report(mine);  // first, since other ranks may be waiting for this rank
  for (;;) {
    // Before the reports are read: a rank may exit after it has reported.
    const auto seen_at = Clock::now();
    const Proof seen = board.look_around();
    if (seen.size() > mine.proof.size()) {
      mine.proof = seen;
      board.report(mine);
    }
    do {
      board.look_if_older(timing::while_collecting(board.size));
      board.wait_for_news(std::min(until, Clock::now() + timing::kLook));
      if (first.empty()) first = board.look_around();
      if (!first.empty() && !board.answered_since(seen_at))
        until = std::min(until, Clock::now() + timing::kForOthers);
    } while (!board.answered_since(seen_at) && !board.is_lost() && Clock::now() < until);
    // What was read before is from before the failure.
    const bool answers = board.answered_since(began), is_new = board.answered_since(seen_at);
    if (answers) findings = dead(board.reports(), board.rank);
    // If the store has not answered since, what was seen first: later, ranks that have given up
    // also exit.
    for (const auto& [rank, state] : is_new ? seen : first) {
      if (findings.reports.count(rank) == 0) findings.proof.emplace(rank, state);
    }
    const auto now = Clock::now();
    if (!findings.proof.empty() || board.is_lost())
      until = std::min(until, now + timing::kAfterProof);
    const bool complete = static_cast<int>(findings.reports.size()) == board.size - 1;
    if (complete || now >= until) return complete || (answers && !board.is_lost());
  }
}

std::string describe(const Findings& findings, Board& board, const RankRecord& mine, bool answers) {
  std::string text;
  for (const auto& [rank, state] : findings.proof)
    text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!board.has_store) return text;
  if (!answers) return text + kNoAnswer;
  if (!findings.proof.empty()) return text;
  std::vector<int> silent;
  for (int rank = 0; rank < board.size; ++rank) {
    if (rank != board.rank && findings.reports.count(rank) == 0) silent.push_back(rank);
  }
  if (!silent.empty()) {
    text += "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") +
            " not reported this failure within " + std::to_string(board.patience.count()) +
            " ms: left the group, stopped, unreachable, or did not reach this collective";
  } else {
    text += "; every rank has reported this failure";
    if (board.look_around(ProcessState::kEnded).empty()) text += ", and none has ended";
  }
  for (const auto& [rank, other] : findings.reports) {
    // If a hook fails in the same call on several ranks, a silent rank is the reason.
    const bool same_call = in_common(other.failure) == in_common(mine.failure);
    if (same_call && (other.cause == mine.cause || other.cause.empty() ||
                      (!mine.cause.empty() && !silent.empty())))
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
    RankRecord mine;
    mine.failure = what;
    mine.cause = cause;
    {
      const std::lock_guard<std::mutex> own(known->mutex);
      mine.state = known->stall;
    }
    Findings findings;
    const bool answers = collect(board, mine, findings);
    board.verdict = describe(findings, board, mine, answers) + known->note;
    for (const auto& [rank, other] : findings.reports) {
      if (mine.state.empty()) mine.state = other.state;
    }
    if (!mine.state.empty()) *board.verdict += "\nStall report before the failure:\n" + mine.state;
  }
  return *board.verdict;
} catch (...) {
  return {};
}

}  // namespace apex::parallel
