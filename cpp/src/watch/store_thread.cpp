// SPDX-License-Identifier: BSD-3-Clause
#include "watch/store_thread.h"

#include <map>
#include <mutex>
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

/// PrefixStore has no getter for its prefix.
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

std::shared_ptr<StoreThread> StoreThread::of(const StorePtr& store) {
  struct Known {
    c10::weak_intrusive_ptr<c10d::Store> base;  // reserves the address
    std::weak_ptr<StoreThread> thread;
  };
  // Never destroyed: groups may be created while the process exits.
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
  std::shared_ptr<StoreThread> made(new StoreThread);
  all->insert_or_assign(key, Known{c10::weak_intrusive_ptr<c10d::Store>(base), made});
  return made;
}

StorePtr StoreThread::connected(const StorePtr& store) {
  if (auto* const prefixed = as_prefixed(store)) {
    StorePtr below = connected(prefixed->getUnderlyingStore());
    if (below == prefixed->getUnderlyingStore()) return store;
    return c10::make_intrusive<c10d::PrefixStore>(Prefix::of(*prefixed), std::move(below));
  }
  const auto* const server = dynamic_cast<const c10d::TCPStore*>(store.get());
  if (server == nullptr) return store;
  if (!connection_) {
    if (losses_ > 0) {
      // torch's store would retry for minutes and log it.
      if (Clock::now() < not_before_) throw Error("the store was lost");
      const std::string why =
          distributed::wait_for_listener(server->getHost(), server->getPort(), timing::kProbe);
      if (!why.empty()) {
        not_before_ = Clock::now() + timing::kReconnect;
        throw Error("the store was lost, and " + why);
      }
    }
    connection_ = store->clone();
  }
  return connection_;
}

void StoreThread::connection_lost() {
  if (!connection_) return;
  connection_.reset();
  ++losses_;
}

int64_t StoreThread::losses() const { return losses_; }

StorePtr StoreClient::view() {
  const StorePtr given = given_.lock();
  if (!given) throw Error("the store was destroyed");
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
    if (!view_) throw;  // the connection was not in use
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
