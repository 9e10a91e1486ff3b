// SPDX-License-Identifier: BSD-3-Clause
#include "watch/store_thread.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "comm/endings.h"
#include "watch/forced_unwind.h"
#include "watch/process_state.h"

namespace apex::parallel {

namespace {

StorePtr base_of(StorePtr store) {
  while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingStore();
  return store;
}

const c10d::TCPStore* as_tcp(const StorePtr& base) {
  return dynamic_cast<const c10d::TCPStore*>(base.get());
}

}  // namespace

struct StoreThread::State {
  std::mutex mutex;  ///< guards what follows
  std::condition_variable news;
  std::multimap<Clock::time_point, std::function<void()>> jobs;
  bool ended = false;

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

StoreThread::StoreThread() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { State::loop(state); }).detach();
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

std::shared_ptr<StoreThread> StoreThread::of(const StorePtr& store) {
  // Of the server, or of the store: a new store may get the address and the thread of an old one.
  using Address = std::pair<std::string, const void*>;
  // Never destroyed: groups may be created while the process exits.
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<int64_t, Address>, std::weak_ptr<StoreThread>>;
  const StorePtr base = base_of(store);
  const auto* const tcp = as_tcp(base);
  const std::lock_guard<std::mutex> lock(*mutex);
  for (auto known = all->begin(); known != all->end();)
    known = known->second.expired() ? all->erase(known) : std::next(known);
  const Address address =
      tcp != nullptr ? Address(tcp->getHost() + ' ' + std::to_string(tcp->getPort()), nullptr)
                     : Address("", base.get());
  std::weak_ptr<StoreThread>& known = (*all)[{this_pid(), address}];
  std::shared_ptr<StoreThread> thread = known.lock();
  if (!thread) {
    thread.reset(new StoreThread);
    known = thread;
  }
  return thread;
}

StoreClient::StoreClient(const c10d::ProcessGroup& group)
    : group_(c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(
          const_cast<c10d::ProcessGroup*>(&group))),
      thread_(StoreThread::of(group.getStore())) {}

StorePtr StoreClient::view() {
  auto group = group_.lock();
  const StorePtr given = group ? group->getStore() : StorePtr();
  if (group.use_count() == 1)
    end_elsewhere([group = std::move(group)]() mutable { group.reset(); }, false);
  group.reset();
  if (!given) throw Error("the group was destroyed");
  if (lost_) throw Error("the store was lost");
  if (as_tcp(base_of(given)) == nullptr) return given;
  if (clone_) return clone_;
  lost_ = true;  // torch's store would retry each call for minutes, and log it
  clone_ = given->clone();
  lost_ = false;
  return clone_;
}

void StoreClient::run(const Body& body) {
  const StorePtr store = view();
  try {
    body(*store);
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    lost_ = clone_ != nullptr;
    clone_.reset();
    throw;
  }
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
    body = nullptr;  // after the future is set, this thread holds no reference
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
