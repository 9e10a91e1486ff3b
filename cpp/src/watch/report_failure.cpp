// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;

/// Reports the failure and collects other ranks' reports, until the state of every rank is known or
/// patience ends. Returns whether the store answers. If it does not, the findings are the processes
/// that this rank itself saw exit first; later, ranks that have given up also exit.
bool collect(Board& board, const std::string& what, Findings& findings) {
  const auto began = Clock::now();
  auto until = began + (board.has_store() ? board.patience : timing::kForOthers), seen_at = began;
  Proof seen = board.look_around(), proven, first_seen;
  board.report(what, seen);  // first, since other ranks may be waiting for this rank
  board.look_now();
  for (;; board.look_if_older(timing::while_collecting(board.size))) {
    if (first_seen.empty()) first_seen = seen.empty() ? board.look_around() : seen;
    // What was read may be from before the failure.
    const bool answered = board.answered_since(began);
    if (answered) findings = dead(board.reports(), board.rank);
    // Use exits seen before the reports were read, since a rank may exit after it has reported.
    const bool reports_are_newer = board.answered_since(seen_at);
    if (reports_are_newer) proven = seen;
    for (const auto& [rank, state] : proven) {
      if (findings.reports.count(rank) == 0) findings.proof.emplace(rank, state);
    }
    const bool store_failed = board.failed_since(began);
    const auto now = Clock::now();
    if (!findings.proof.empty() || store_failed) until = std::min(until, now + timing::kAfterProof);
    if (!seen.empty()) until = std::min(until, now + timing::kForOthers);
    const bool all = static_cast<int>(findings.reports.size()) == board.size - 1;
    if (all || now >= until) {
      if (!answered) findings.proof = first_seen;
      return answered;
    }
    board.wait_for_news(std::min(until, now + timing::kLook));
    if (!reports_are_newer && !store_failed && board.has_store()) continue;
    seen_at = Clock::now();
    const size_t before = seen.size();
    seen = board.look_around();
    if (seen.size() > before) board.report(what, seen);
  }
}

std::string describe(const Findings& findings, Board& board, const std::string& what,
                     bool store_answers) {
  std::string text;
  for (const auto& [rank, state] : findings.proof)
    text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!board.has_store()) return text;
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
    if (other != what) text += "; rank " + std::to_string(rank) + " failed in " + other;
  }
  return text;
}

}  // namespace

std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr known = watched(group);
  if (!known) return {};
  Board& board = *known->board;
  {
    const std::lock_guard<std::mutex> lock(board.verdict_mutex);
    if (Clock::now() < board.verdict_until) return board.verdict;
  }
  Findings findings;
  const bool answers = collect(board, what, findings);
  std::string verdict = describe(findings, board, what, answers);
  const std::lock_guard<std::mutex> lock(board.verdict_mutex);
  board.verdict = verdict;
  board.verdict_until = Clock::now() + timing::kVerdictHolds;
  return verdict;
} catch (...) {
  return {};
}

}  // namespace apex::parallel
