// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <mutex>
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
  explicit State(const WatchedGroupPtr& known) : group(known), stall(known) {}

  const WatchedGroupPtr group;
  const Clock::time_point began = Clock::now();
  const StatusBoard::Following following = group->board->follow(timing::between_looks(group->size));
  StallWatch stall;
  Clock::time_point look_at;
  Clock::time_point ended_at;
  std::chrono::milliseconds late = timing::kLate;
  Clock::time_point compare_at = began + late;
  std::shared_ptr<Comparison> comparison = std::make_shared<Comparison>();
};

Wait::Wait(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr known = find_watched(group);
  if (known) state_ = std::make_unique<State>(known);
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
    if (state.group->board->read([](const RankStatuses& all) { return !all.empty(); }))
      return {Verdict::kFailed, {}};
  }
  {
    const std::lock_guard<std::mutex> lock(state.comparison->mutex);
    if (!state.comparison->difference.empty())
      return {Verdict::kApart, state.comparison->difference};
  }
  if (Clock::now() >= state.compare_at) compare();
  state.stall.poll();
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
    const WatchedGroupPtr root = state.group->root();
    const std::lock_guard<std::mutex> lock(root->mutex);
    if (root->ended_first.empty()) root->ended_first = ended;
  }
  return now - state.ended_at > timing::kAlone &&
         !state.group->board->answered_since(state.ended_at);
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  one->calls.add(what);
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
  if (!one) return false;
  const WatchedGroupPtr root = one->root();
  const std::lock_guard<std::mutex> lock(root->mutex);
  return root->failure.has_value();
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  const WatchedGroupPtr root = one->root();
  root->report({what, {}}).wait_until(Clock::now() + root->patience);
  // It knows the cause, so rank 0 need not wait until it has read the reports.
  if (root->announced.exchange(true)) return;
  root->store->post([root](c10d::Store& store) { store.add(root->key(store, "left"), 1); });
} catch (...) {
  // The other ranks wait until their timeout.
}

}  // namespace apex::parallel
