// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;

/// Reports the failure and collects other ranks' reports, until the state of every rank is known or
/// patience ends. `first_seen`: the processes that this rank itself saw exit first; later, ranks
/// that have given up also exit. Returns whether the store answers.
bool collect(const WatchedGroupPtr& group, const std::string& what, Findings& findings,
             Proof& first_seen) {
  const auto began = Clock::now();
  auto until = began + group->patience, seen_at = began;
  Proof seen = look_around(*group), proven;
  const auto report = [&] { group->report({what, seen}); };
  report();  // first, since other ranks may be waiting for this rank
  if (!group->knows_processes()) read_processes(group);
  const auto following = group->board->follow(timing::while_collecting(group->size));
  for (;;) {
    if (first_seen.empty()) first_seen = seen.empty() ? look_around(*group) : seen;
    // The copy in memory may be from an earlier failure.
    const bool answered = group->board->answered_since(began);
    if (answered) {
      findings = group->board->read(
          [&](const RankStatuses& statuses) { return find(statuses, group->rank); });
    }
    // Use exits seen before the reports were read, since a rank may exit after it has reported.
    const bool reports_are_newer = group->board->answered_since(seen_at);
    if (reports_are_newer) proven = seen;
    for (const auto& [rank, state] : proven) {
      if (findings.reports.count(rank) == 0) findings.proof.emplace(rank, state);
    }
    const bool store_failed = group->board->failed_since(began);
    const auto now = Clock::now();
    if (!findings.proof.empty() || store_failed) until = std::min(until, now + timing::kAfterProof);
    if (!seen.empty()) until = std::min(until, now + timing::kForOthers);
    const bool all = static_cast<int>(findings.reports.size()) == group->size - 1;
    if (all || now >= until) return answered;
    group->board->wait_for_news(std::min(until, now + timing::kLook));
    if (!reports_are_newer && !store_failed) continue;
    seen_at = Clock::now();
    const size_t said = seen.size();
    seen = look_around(*group);
    if (seen.size() > said) report();
  }
}

/// Reports on rank 0, which usually hosts the store, would be lost with its process when other
/// ranks learn of the failure late or read slowly. So rank 0 waits shortly until `others` ranks
/// have read them.
void leave_store(const WatchedGroupPtr& root, int64_t others) {
  const auto until = Clock::now() + timing::kUntilAllHaveRead;
  const auto add = [&](int64_t one) {
    const auto count = std::make_shared<std::atomic<int64_t>>(0);
    const bool answered = root->store->call(
        [count, one, root](c10d::Store& store) {
          *count = store.add(root->key(store, "left"), one);
        },
        until);
    return answered ? count->load() : -1;
  };
  int64_t left = add(root->announced.exchange(false) ? 0 : 1) - 1;
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun's store
  if (root->rank != 0 || (agent != nullptr && std::string(agent) == "True")) return;
  for (; left >= 0 && left < others && Clock::now() < until; left = add(0) - 1)
    root->board->wait_for_news(Clock::now() + timing::kLook);
}

std::string describe(const Findings& findings, WatchedGroup& group, const std::string& what,
                     bool store_answers) {
  std::string text;
  for (const auto& [rank, state] : findings.proof)
    text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!store_answers) {
    return text +
           "; the store, through which ranks report, does not answer: the process that holds it, "
           "usually rank 0 or the launcher, has ended, is stopped, or cannot be reached";
  }
  if (!findings.proof.empty()) return text;
  std::vector<int> silent;
  for (int rank = 0; rank < group.size; ++rank) {
    if (rank != group.rank && findings.reports.count(rank) == 0) silent.push_back(rank);
  }
  if (!silent.empty()) {
    text += "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") +
            " not reported this failure within " + std::to_string(group.patience.count()) +
            " ms: stopped, unreachable, or did not reach this collective";
  } else {
    text += "; every rank has reported this failure";
    if (look_around(group, ProcessState::kEnded).empty()) text += ", and none has ended";
  }
  for (const auto& [rank, other] : findings.reports) {
    if (other != what) text += "; rank " + std::to_string(rank) + " failed in " + other;
  }
  return text;
}

std::string investigate(const WatchedGroupPtr& group, const std::string& what) {
  if (!group->store->is_there()) return {};
  Findings findings;
  Proof seen;
  const bool answers = collect(group, what, findings, seen);
  if (!answers) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    findings.proof = group->ended_first.empty() ? seen : group->ended_first;
  }
  const std::string text = describe(findings, *group, what, answers);
  // Without proof, patience has ended, so every live rank had time to report.
  const size_t there =
      findings.proof.empty() ? findings.reports.size() : group->size - 1 - findings.proof.size();
  if (answers) leave_store(group, static_cast<int64_t>(there));
  return text;
}

}  // namespace

std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr known = watched(group);
  if (!known) return {};
  const WatchedGroupPtr one = known->root();
  {
    const std::lock_guard<std::mutex> lock(one->mutex);
    if (Clock::now() < one->verdict_until) return one->verdict;
  }
  std::string verdict = investigate(one, what);
  const std::lock_guard<std::mutex> lock(one->mutex);
  one->verdict = verdict;
  one->verdict_until = Clock::now() + timing::kVerdictHolds;
  return verdict;
} catch (...) {
  return {};
}

}  // namespace apex::parallel
