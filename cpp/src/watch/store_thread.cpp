// SPDX-License-Identifier: BSD-3-Clause
#include "watch/store_thread.h"

#include <map>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "comm/endings.h"
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

/// What the store's calls put before a key.
std::optional<std::string> prefix_of(const StorePtr& store) {
  auto* const prefixed = as_prefixed(store);
  if (prefixed == nullptr) return std::nullopt;
  const auto below = prefix_of(prefixed->getUnderlyingStore());
  return (below ? *below + "/" : std::string()) + Prefix::of(*prefixed);
}

StorePtr base_of(StorePtr store) {
  while (auto* const prefixed = as_prefixed(store)) store = prefixed->getUnderlyingStore();
  return store;
}

const c10d::TCPStore* as_server(const StorePtr& base) {
  return dynamic_cast<const c10d::TCPStore*>(base.get());
}

}  // namespace

StoreThread::StoreThread(const c10d::TCPStore* server) {
  if (server == nullptr) return;
  c10d::TCPStoreOptions options;
  options.port = server->getPort();
  options.waitWorkers = false;
  options.timeout = server->getTimeout();
  options.useLibUV = server->isLibUvBackend();
  server_ = Server{server->getHost(), options};
}

std::shared_ptr<StoreThread> StoreThread::of(const StorePtr& store) {
  // Of the server, or of the store: a new store may get the address and the thread of an old one.
  using Address = std::pair<std::string, const void*>;
  // Never destroyed: groups may be created while the process exits.
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<int64_t, Address>, std::weak_ptr<StoreThread>>;
  const StorePtr base = base_of(store);
  const auto* const server = as_server(base);
  const std::lock_guard<std::mutex> lock(*mutex);
  for (auto known = all->begin(); known != all->end();)
    known = known->second.expired() ? all->erase(known) : std::next(known);
  const Address address =
      server != nullptr
          ? Address(server->getHost() + ' ' + std::to_string(server->getPort()), nullptr)
          : Address("", base.get());
  std::weak_ptr<StoreThread>& known = (*all)[{this_pid(), address}];
  std::shared_ptr<StoreThread> thread = known.lock();
  if (!thread) {
    thread.reset(new StoreThread(server));
    known = thread;
  }
  return thread;
}

StorePtr StoreThread::connection() {
  if (connection_) return connection_;
  if (gone_) throw Error("the store was lost");
  try {
    connection_ = c10::make_intrusive<c10d::TCPStore>(server_->host, server_->options);
  } catch (...) {
    gone_ = true;  // torch's store has retried, and logged it
    throw;
  }
  return connection_;
}

void StoreThread::connection_lost() {
  if (!connection_) return;
  connection_.reset();
  ++losses_;
  server_->options.timeout = timing::kReconnect;
}

int64_t StoreThread::losses() const { return losses_; }

StoreClient::StoreClient(const c10d::ProcessGroup& group)
    : group_(c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(
          const_cast<c10d::ProcessGroup*>(&group))),
      thread_(StoreThread::of(group.getStore())),
      prefix_(prefix_of(group.getStore())) {}

StorePtr StoreClient::view() {
  auto group = group_.lock();
  const StorePtr given = group ? group->getStore() : StorePtr();
  if (group.use_count() == 1)
    end_elsewhere([group = std::move(group)]() mutable { group.reset(); }, false);
  group.reset();
  if (!given) throw Error("the group was destroyed");
  if (!thread_->has_server()) return given;
  if (view_ && losses_ == thread_->losses()) return view_;
  view_ = thread_->connection();
  losses_ = thread_->losses();
  if (prefix_) view_ = c10::make_intrusive<c10d::PrefixStore>(*prefix_, view_);
  return view_;
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
