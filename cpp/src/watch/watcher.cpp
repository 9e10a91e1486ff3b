// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <mutex>
#include <utility>

#include "plain_text.h"
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

namespace {

/// Shortened, since every waiting rank reads all posts. A traceback has the message at its end,
/// other texts at their beginning.
std::string shortened(const std::string& cause) {
  constexpr size_t kBegin = 150, kEnd = 450;
  if (cause.size() <= kBegin + kEnd) return cause;
  return cause.substr(0, character_before(cause, kBegin)) + " ... " +
         cause.substr(character_before(cause, cause.size() - kEnd));
}

}  // namespace

struct Wait::State {
  State(const WatchedGroupPtr& known, bool in_hook)
      : group(known), at(known->position(in_hook)), stall(known) {}

  const WatchedGroupPtr group;
  const Position at;
  const Clock::time_point began = Clock::now();
  const StatusBoard::Following following = group->board->follow(timing::between_looks(group->size));
  StallWatch stall;
  Clock::time_point look_at;
  Clock::time_point ended_at;
  std::chrono::milliseconds late = timing::kLate;
  Clock::time_point compare_at = began + late;
  std::shared_ptr<Comparison> comparison = std::make_shared<Comparison>();
};

Wait::Wait(const c10d::ProcessGroup& group, Where where) {
  const WatchedGroupPtr known = find_watched(group);
  if (known) state_ = std::make_unique<State>(known, where == kInHook);
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
  return root->status.failure.has_value();
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  const WatchedGroupPtr root = one->root();
  root->report([&](RankStatus& status) { status.failure = RankStatus::Failure{what, {}}; })
      .wait_until(Clock::now() + root->patience);
  // It knows the cause, so rank 0 need not wait until it has read the reports.
  if (root->announced.exchange(true)) return;
  root->store->post([root](c10d::Store& store) { store.add(root->key(store, "left"), 1); });
} catch (...) {
  // The other ranks wait until their timeout.
}

bool hooks_failed_alike(const std::vector<GroupPtr>& groups, const GroupPtr& group,
                        const std::string& what, const std::string& cause, bool begun,
                        std::chrono::milliseconds timeout, const std::function<bool()>& meanwhile) {
  std::vector<WatchedGroupPtr> all;
  std::vector<StatusBoard::Following> following;
  for (const GroupPtr& one : groups) {
    all.push_back(watched(*one));
    if (!all.back()) return false;
    following.push_back(all.back()->board->follow(timing::while_collecting(all.back()->size)));
    const int64_t position = 2 * all.back()->calls.last_number() + (one == group ? 0 : 1);
    all.back()->report([&](RankStatus& status) {
      status.hook =
          RankStatus::Hook{all.back()->hooks_failed, position, begun, what, shortened(cause)};
    });
  }
  const auto give_up = [&] {
    for (const GroupPtr& one : groups) announce_failure(*one, what);
  };
  // A hook whose collective has failed may already have waited for a lost rank until the timeout.
  // If every rank's hook has failed with its own error, the other reports arrive soon.
  const auto began = Clock::now();
  const auto until = began + (begun ? all.front()->patience : timeout);
  try {
    for (bool last = false;;) {
      bool apart = false, alike = false;
      for (const WatchedGroupPtr& one : all) {
        if (!one->board->answered_since(began)) continue;  // else from an earlier failure
        const auto answer = one->board->read(
            [&](const RankStatuses& statuses) { return hooks_alike(statuses, one->position()); });
        apart = apart || (answer && !*answer);
        alike = alike || (one == all.front() && answer && *answer);
      }
      if (!apart && alike) {
        for (const WatchedGroupPtr& one : all) ++one->hooks_failed;
        return true;
      }
      if (apart || last || Clock::now() >= until || !meanwhile()) break;
      all.front()->board->wait_for_news(std::min(until, Clock::now() + timing::kLook));
      last = !look_around(*all.front(), ProcessState::kEnded).empty();
    }
  } catch (...) {  // thrown by the interruption check
    give_up();
    throw;
  }
  give_up();
  return false;
}

}  // namespace apex::parallel
