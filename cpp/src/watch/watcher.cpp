// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <mutex>
#include <optional>
#include <utility>

#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"

namespace apex::parallel {

using Clock = std::chrono::steady_clock;

/// Result of the comparison with other ranks, made on the store's thread.
struct Wait::Comparison {
  std::string written;  ///< this rank's calls as written to the store; used on the store's thread

  std::mutex mutex;  ///< guards the rest; not held during store calls
  std::string difference;
};

struct Wait::State {
  WatchedGroupPtr group;
  Position at;
  Clock::time_point began = Clock::now();
  StatusBoard::Following following;
  std::optional<StallWatch> stall;
  Clock::time_point look_at;
  Clock::time_point ended_at;
  Clock::time_point compare_at;
  std::chrono::milliseconds late = timing::kLate;
  std::shared_ptr<Comparison> comparison = std::make_shared<Comparison>();
};

Wait::Wait(const c10d::ProcessGroup& group) {
  begin(group);
  if (state_) state_->stall.emplace(state_->group);
}

Wait::Wait(const c10d::ProcessGroup& group, int64_t call) {
  begin(group);
  if (!state_) return;
  state_->at.call = call;
  state_->at.or_before = true;
}

void Wait::begin(const c10d::ProcessGroup& group) {
  WatchedGroupPtr known = find_watched(group);
  if (!known) return;
  state_ = std::make_unique<State>();
  state_->at = known->position();
  state_->following = known->board->follow(timing::between_looks(known->size));
  state_->compare_at = Clock::now() + state_->late;
  state_->group = std::move(known);
}

Wait::~Wait() {
  if (!state_ || state_->late == timing::kLate) return;  // no comparison was made
  state_->group->store->post(
      [group = state_->group, comparison = state_->comparison](c10d::Store& store) {
        if (!comparison->written.empty())
          compare_set(store, group->key(store, "calls"), comparison->written, {});
      });
}

Verdict Wait::poll() {
  if (!state_) return {};
  State& state = *state_;
  // The copy in memory may be from an earlier wait.
  if (state.group->board->answered_since(state.began)) {
    Verdict verdict =
        state.group->board->read([&](const RankStatuses& all) { return judge(all, state.at); });
    if (verdict.kind != Verdict::kOk) return verdict;
  }
  {
    const std::lock_guard<std::mutex> lock(state.comparison->mutex);
    if (!state.comparison->difference.empty())
      return {Verdict::kApart, state.comparison->difference};
  }
  // A GPU may just be busy with other work: then neither compare nor report.
  if (state.stall) {
    if (Clock::now() >= state.compare_at) compare();
    state.stall->poll();
  }
  if (is_left_alone()) return {Verdict::kLost, {}};
  return {};
}

/// See Note [Ranks in different collectives].
void Wait::compare() {
  state_->late *= 2;
  state_->compare_at = Clock::now() + state_->late;
  state_->group->store->post(
      [group = state_->group, comparison = state_->comparison](c10d::Store& store) {
        const std::string mine = group->calls.encode(group->rank);
        const std::string key = group->key(store, "calls");
        std::string there = compare_set(store, key, comparison->written, mine);
        std::string difference;
        if (there != mine) {
          difference = group->calls.difference(group->rank, there);
          if (difference.empty() && group->calls.goes_further_than(there))
            there = compare_set(store, key, there, mine);
        }
        comparison->written = there == mine ? mine : std::string();
        const std::lock_guard<std::mutex> lock(comparison->mutex);
        comparison->difference = std::move(difference);
      });
}

/// See Note [When the store is lost].
bool Wait::is_left_alone() {
  State& state = *state_;
  const auto now = Clock::now();
  if (now < state.look_at) return false;
  state.look_at = now + timing::kNeighbours;
  if (state.ended_at == Clock::time_point()) {
    const Proof ended = look_around(*state.group, ProcessState::kEnded);
    if (ended.empty()) return false;
    state.ended_at = now;
    const std::lock_guard<std::mutex> lock(state.group->mutex);
    if (state.group->ended_first.empty()) state.group->ended_first = ended;
  }
  return now - state.ended_at > timing::kAlone &&
         !state.group->board->answered_since(state.ended_at);
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  one->calls.add(what);
  one->go_on();
  if (one->stalled.exchange(false)) {
    const std::lock_guard<std::mutex> lock(one->mutex);
    one->stall.clear();
  }
} catch (...) {
  // A collective that fails reports the problem with the store.
}

bool others_wait(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->root()->reported_elsewhere;
}

std::string stall_verdict(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr one = find_watched(group);
  if (!one || !one->stalled) return {};
  std::string latest = latest_verdict(one);
  if (!latest.empty()) return latest;
  const std::lock_guard<std::mutex> lock(one->mutex);
  return one->stall;
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->has_failed();
}

void refuse_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  begin_call(group, {});
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  one->expect_more(one);  // the report is over for this rank
  one->report([&](RankStatus& status) {
       if (!status.failure) status.failure.emplace();
       if (status.failure->refused.empty() && !status.failure->what.empty()) return;
       status.failure->what = what;
       status.failure->over = false;
       status.failure->refused.push_back(one->calls.last_number());
     })
      .wait_until(Clock::now() + one->patience);
} catch (...) {
  // The other ranks wait until their timeout.
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  one->report(
         [&](RankStatus& status) { status.failure = RankStatus::Failure{what, {}, {}, false}; })
      .wait_until(Clock::now() + one->patience);
  // It knows the cause, so rank 0 need not wait until it has read the reports.
  const WatchedGroupPtr root = one->root();
  if (root->announced.exchange(true)) return;
  root->store->post([root](c10d::Store& store) { store.add(root->key(store, "left"), 1); });
} catch (...) {
  // The other ranks wait until their timeout.
}

}  // namespace apex::parallel
