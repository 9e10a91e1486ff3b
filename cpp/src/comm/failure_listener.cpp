// SPDX-License-Identifier: BSD-3-Clause
#include "comm/failure_listener.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/group_record.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kListen{200};  // between two looks
constexpr int64_t kAnyCall = std::numeric_limits<int64_t>::max() / 4;
constexpr milliseconds kLate{2000};  // until who waits looks whether the others are where it is

}  // namespace

// Note [When the store is lost]
//
// As a rule the process that keeps the store is a rank. When it ends, nobody can report any more;
// and Gloo does not always notice that a connection has been closed (one in some hundred killed
// ranks), so that who waits would do so until the timeout. So it looks at the processes of its
// host, and gives up when one has ended and nothing has come of the collective, or of the store,
// for two seconds more. Those that end first are remembered: the others have given up.

struct FailureListener::State {
  GroupRecordPtr record;
  std::atomic<Clock::time_point> answered{Clock::time_point()};  ///< by the store
  std::atomic<bool> heard{false};
  // Of who waits.
  Clock::time_point look_at;
  Clock::time_point ended_at;

  std::mutex mutex;  ///< guards what follows
  std::string apart;
  std::string hook;
  std::condition_variable wake;
  bool ended = false;
};

FailureListener::FailureListener(const c10d::ProcessGroup& group, Waiting waiting)
    : state_(std::make_shared<State>()) {
  const GroupRecordPtr record = find_record(group);
  const StorePtr store = record ? record->store.lock() : nullptr;
  if (!store) return;
  state_->record = record;
  std::thread([state = state_, store, record, waiting, call = record->calls.last_number()] {
    const GroupRecordPtr& other = record->heard_too;
    const StorePtr others_store = other ? other->store.lock() : nullptr;
    try {
      const StorePtr own = own_connection(store);
      const StorePtr others_own = others_store ? own_connection(others_store) : nullptr;
      auto compare_at = Clock::now() + kLate;
      std::unique_lock<std::mutex> lock(state->mutex);
      while (!state->ended) {
        lock.unlock();
        const bool reported = own->add(record->count_key(), 0) > 0;
        // Who has heard of a hook reports a failure, for which the hook is the reason.
        std::string hook = failed_hook(*own, *record, reported ? kAnyCall : call, waiting);
        if (!hook.empty()) {
          lock.lock();
          state->hook = std::move(hook);
          return;
        }
        if (reported) state->heard = true;
        if (others_own && others_own->add(other->count_key(), 0) > 0) state->heard = true;
        if (own->check({record->refusal_key(call)})) state->heard = true;
        state->answered = Clock::now();
        std::string apart;
        if (!state->heard && Clock::now() >= compare_at) {
          apart = record->calls.compare(*own, record->name, record->rank);
          compare_at = Clock::time_point::max();
        }
        lock.lock();
        state->apart = std::move(apart);
        if (state->heard || !state->apart.empty()) return;
        state->wake.wait_for(lock, kListen, [&] { return state->ended; });
      }
      record->calls.forget(*own);
    } catch (...) {
      // See Note [When the store is lost].
    }
  }).detach();
}

FailureListener::~FailureListener() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ended = true;
  state_->wake.notify_all();
}

bool FailureListener::heard() const { return state_->heard; }

bool FailureListener::is_left_alone() {
  const auto now = Clock::now();
  if (!state_->record || now < state_->look_at) return false;
  state_->look_at = now + kListen;
  if (state_->ended_at == Clock::time_point()) {
    const auto ended = look_around(*state_->record, ProcessState::kEnded);
    if (ended.empty()) return false;
    state_->ended_at = now;
    const std::lock_guard<std::mutex> lock(state_->record->mutex);
    if (state_->record->ended_first.empty()) state_->record->ended_first = ended;
  }
  return now - state_->ended_at > kLate && state_->answered.load() < state_->ended_at;
}

std::string FailureListener::hook() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->hook;
}

std::string FailureListener::apart() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->apart;
}

}  // namespace apex::parallel
