#include "comm/failure_listener.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/group_record.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kListen{200};  // between two looks
constexpr milliseconds kLate{2000};   // until who waits looks whether the others are where it is

}  // namespace

struct FailureListener::State {
  std::atomic<bool> heard{false};
  std::mutex mutex;
  std::string apart;
  std::condition_variable wake;
  bool ended = false;
};

FailureListener::FailureListener(const c10d::ProcessGroup& group) : state_(std::make_shared<State>()) {
  const GroupRecordPtr record = find_record(group);
  const StorePtr store = record ? record->store.lock() : nullptr;
  if (!store) return;
  std::thread([state = state_, store, record, call = record->calls.last_number()] {
    const GroupRecordPtr& other = record->heard_too;
    const StorePtr others_store = other ? other->store.lock() : nullptr;
    try {
      const StorePtr own = own_connection(store);
      const StorePtr others_own = others_store ? own_connection(others_store) : nullptr;
      auto compare_at = Clock::now() + kLate;
      std::unique_lock<std::mutex> lock(state->mutex);
      while (!state->ended) {
        lock.unlock();
        if (own->add(record->count_key(), 0) > 0) state->heard = true;
        if (others_own && others_own->add(other->count_key(), 0) > 0) state->heard = true;
        if (own->check({record->refusal_key(call)})) state->heard = true;
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
      // The store is lost: the collective will end by itself.
    }
  }).detach();
}

FailureListener::~FailureListener() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ended = true;
  state_->wake.notify_all();
}

bool FailureListener::heard() const { return state_->heard; }

std::string FailureListener::apart() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->apart;
}

}  // namespace apex::parallel
