// SPDX-License-Identifier: BSD-3-Clause
#include "watch/store_thread.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "distributed/tcp_probe.h"
#include "watch/forced_unwind.h"
#include "watch/process_state.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

/// A prefix has no getter.
struct Prefix : c10d::PrefixStore {
  static const std::string& of(const c10d::PrefixStore& store) { return store.*(&Prefix::prefix_); }
};

c10d::PrefixStore* as_prefixed(const StorePtr& store) {
  return dynamic_cast<c10d::PrefixStore*>(store.get());
}

StorePtr base_of(StorePtr store) {
  while (auto* const prefixed = as_prefixed(store)) store = prefixed->getUnderlyingStore();
  return store;
}

}  // namespace

struct StoreThread::State {
  std::mutex mutex;  ///< guards what follows
  std::condition_variable news;
  std::multimap<Clock::time_point, std::function<void()>> jobs;
  bool ended = false;

  // Of the thread.
  StorePtr connection;
  int64_t losses = 0;
  Clock::time_point not_before;  ///< is a connection made again

  static void loop(const std::shared_ptr<State>& state) {
    for (std::unique_lock<std::mutex> lock(state->mutex);;) {
      const auto first = state->jobs.begin();
      if (first != state->jobs.end() && first->first <= Clock::now()) {
        std::function<void()> job = std::move(first->second);
        state->jobs.erase(first);
        lock.unlock();
        job();
        job = nullptr;
        lock.lock();
      } else if (state->ended) {
        return;
      } else if (first == state->jobs.end()) {
        state->news.wait(lock);
      } else {
        state->news.wait_until(lock, first->first);
      }
    }
  }
};

std::shared_ptr<StoreThread> StoreThread::of(const StorePtr& store) {
  struct Known {
    c10::weak_intrusive_ptr<c10d::Store> base;  // keeps the address from being used again
    std::weak_ptr<StoreThread> thread;
  };
  // Never destroyed: groups may be made while the process ends.
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<int64_t, const void*>, Known>;
  const StorePtr base = base_of(store);
  const std::lock_guard<std::mutex> lock(*mutex);
  for (auto known = all->begin(); known != all->end();)
    known = known->second.thread.expired() ? all->erase(known) : std::next(known);
  const auto key = std::make_pair(this_pid(), static_cast<const void*>(base.get()));
  const auto known = all->find(key);
  if (known != all->end()) {
    if (auto thread = known->second.thread.lock()) return thread;
  }
  const auto state = std::make_shared<State>();
  std::shared_ptr<StoreThread> made(new StoreThread(state));
  std::thread([state] { State::loop(state); }).detach();
  all->insert_or_assign(key, Known{c10::weak_intrusive_ptr<c10d::Store>(base), made});
  return made;
}

StoreThread::~StoreThread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ended = true;
  state_->news.notify_all();
}

void StoreThread::run(std::function<void()> job, Clock::time_point at) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->jobs.emplace(at, std::move(job));
  state_->news.notify_all();
}

StorePtr StoreThread::connected(const StorePtr& store) {
  if (auto* const prefixed = as_prefixed(store)) {
    StorePtr below = connected(prefixed->getUnderlyingStore());
    if (below == prefixed->getUnderlyingStore()) return store;
    return c10::make_intrusive<c10d::PrefixStore>(Prefix::of(*prefixed), std::move(below));
  }
  const auto* const server = dynamic_cast<const c10d::TCPStore*>(store.get());
  if (server == nullptr) return store;
  if (!state_->connection) {
    if (state_->losses > 0) {
      // torch's store tries for minutes, and logs it.
      if (Clock::now() < state_->not_before) throw Error("the store was lost");
      const std::string why =
          distributed::wait_for_listener(server->getHost(), server->getPort(), timing::kProbe);
      if (!why.empty()) {
        state_->not_before = Clock::now() + timing::kReconnect;
        throw Error("the store was lost, and " + why);
      }
    }
    state_->connection = store->clone();
  }
  return state_->connection;
}

void StoreThread::connection_lost() {
  if (!state_->connection) return;
  state_->connection.reset();
  ++state_->losses;
}

int64_t StoreThread::losses() const { return state_->losses; }

StorePtr StoreClient::view() {
  const StorePtr given = given_.lock();
  if (!given) throw Error("the store is gone");
  if (view_ && losses_ == thread_->losses()) return view_;
  StorePtr view = thread_->connected(given);
  losses_ = thread_->losses();
  view_ = view == given ? nullptr : view;
  return view;
}

void StoreClient::run(const Body& body) {
  StorePtr store = view();
  try {
    return body(*store);
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    if (!view_) throw;  // not by the thread's connection
    thread_->connection_lost();
  }
  store = view();
  body(*store);
}

std::shared_future<void> StoreClient::post(Body body) {
  auto done = std::make_shared<std::promise<void>>();
  std::shared_future<void> future = done->get_future().share();
  thread_->run([self = shared_from_this(), body = std::move(body), done]() mutable {
    std::exception_ptr error;
    try {
      self->run(body);
    } catch (APEX_FORCED_UNWIND) {
      throw;
    } catch (...) {
      error = std::current_exception();
    }
    body = nullptr;  // whoever waits may rely on it that nothing is held any more
    self.reset();
    if (error) {
      done->set_exception(error);
    } else {
      done->set_value();
    }
  });
  return future;
}

bool StoreClient::call(Body body, Clock::time_point until) {
  const std::shared_future<void> done = post(std::move(body));
  if (done.wait_until(until) != std::future_status::ready) return false;
  try {
    done.get();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace apex::parallel
