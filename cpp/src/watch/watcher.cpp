// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watcher.h"

#include <chrono>
#include <mutex>
#include <utility>

#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"

namespace apex::parallel {

using Clock = std::chrono::steady_clock;

struct Wait::State {
  explicit State(const WatchedGroupPtr& known) : board(known->board), stall(known) {}

  const std::shared_ptr<Board> board;
  const Clock::time_point began = Clock::now();
  const Board::Looking looking{board, Board::Pace::kWaits};
  StallWatch stall;
  Clock::time_point look_at, ended_at;
};

Wait::Wait(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr known = find_watched(group);
  if (known) state_ = std::make_unique<State>(known);
}

Wait::~Wait() = default;

Verdict Wait::poll() {
  if (!state_) return {};
  Board& board = *state_->board;
  // What was read may be from before the wait.
  if (board.answered_since(state_->began) && board.has_reports()) return {Verdict::kFailed, {}};
  if (std::string difference = state_->stall.poll(); !difference.empty())
    return {Verdict::kApart, std::move(difference)};
  if (is_left_alone()) return {Verdict::kLost, {}};
  return {};
}

/// See Note [When the store is lost].
bool Wait::is_left_alone() {
  State& state = *state_;
  const auto now = Clock::now();
  if (!state.board->has_store() || now < state.look_at) return false;
  state.look_at = now + timing::kNeighbours;
  if (state.ended_at == Clock::time_point()) {
    if (state.board->look_around(ProcessState::kEnded).empty()) return false;
    state.ended_at = now;
  }
  return now - state.ended_at > timing::kAlone && !state.board->answered_since(state.ended_at);
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  const std::lock_guard<std::mutex> lock(one->mutex);
  one->calls.add(what);
  one->began = Clock::now();
  one->asked = false;
} catch (...) {
  // A collective that fails reports the problem with the store.
}

bool others_wait(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->board->answered_elsewhere;
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->board->has_failed();
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  if (const WatchedGroupPtr one = watched(group))
    one->board->report(what, {}).wait_for(timing::kForOthers);  // this process may end now
} catch (...) {
  // The other ranks wait until their timeout.
}

}  // namespace apex::parallel
