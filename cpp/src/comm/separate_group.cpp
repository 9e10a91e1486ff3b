// SPDX-License-Identifier: BSD-3-Clause
#include "comm/separate_group.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/error.h>

#include "comm/collectives.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "transport/host_backend.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using BackendType = c10d::ProcessGroup::BackendType;
using HostBackendPtr = c10::intrusive_ptr<HostBackend>;

/// Grace period after the timeout, at which connecting ends by itself if the store answers.
constexpr milliseconds kAtTheLatest{500};

/// A store connection serves one call at a time, so a thread that waits for a key blocks other
/// threads. One of them may be about to write the key that a peer waits for. So this class polls
/// instead of waiting in the store. (Store::clone() takes a quarter of a second.)
class PatientStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto until = Clock::now() + timeout;
    for (milliseconds pause{1}; !check(keys); pause = std::min(2 * pause, milliseconds(50))) {
      if (Clock::now() >= until)
        throw Error("nothing came within " + std::to_string(timeout.count()) + " ms");
      std::this_thread::sleep_for(pause);
    }
  }
};

/// Gloo reports a connection before the peers have seen it. If this rank dropped the group right
/// away, peers would find a closed connection. So wait until every rank has connected.
void meet(c10d::Backend& backend) {
  std::vector<at::Tensor> nothing{at::zeros({1}, at::kInt)};
  backend.allreduce(nothing, c10d::AllreduceOptions())->wait();
}

distributed::BackendRequest request_for(const c10d::ProcessGroup& group,
                                        const c10d::Backend::Options& options) {
  distributed::BackendRequest request;
  request.rank = group.getRank();
  request.size = group.getSize();
  request.timeout = options.timeout;
  request.global_ranks = options.global_ranks_in_group;
  return request;
}

/// Runs `make()` on another thread. The ranks of `parent` may have to meet in the store, whose
/// process may be stopped and whose calls have no deadline.
HostBackendPtr connect_backend(const c10d::ProcessGroup& parent, const std::string& what,
                               milliseconds timeout, std::function<HostBackendPtr()> make) {
  refuse_failed_group(what, parent);
  begin_call(parent, what);  // from here on this rank receives and sends failure reports
  // When the future is set, the thread has no more references.
  std::packaged_task<HostBackendPtr()> task(
      [make = std::move(make)]() mutable { return std::exchange(make, nullptr)(); });
  std::future<HostBackendPtr> made = task.get_future();
  with_errors_about(what, parent, [&] { std::thread(std::move(task)).detach(); });
  HostBackendPtr backend;
  const auto deadline = Clock::now() + timeout + kAtTheLatest;
  wait_for_ranks(what, parent, [&](milliseconds slice) {
    const auto now = Clock::now();
    const bool ended =
        made.wait_until(std::min(now + slice, deadline)) == std::future_status::ready;
    if (!ended && now >= deadline) {
      throw Error("the ranks did not meet within " + std::to_string(timeout.count()) + " ms");
    }
    if (ended) backend = made.get();
    return ended;
  });
  return backend;
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_separate_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name, bool connects) {
  const auto store = parent->getStore();
  if (!store || parent->getSize() == 1 || !detail::has_backend(*parent, at::kCPU)) return parent;
  const BackendPtr given = parent->getBackend(at::kCPU);
  const auto options = distributed::gloo_options(*given);
  if (!options) return parent;
  const auto attached = host_backend_of(*parent);
  auto* const host = dynamic_cast<HostBackend*>(&distributed::unwrapped(*given));
  const BackendPtr gloo = !connects ? nullptr : host != nullptr ? host->gloo_or_null() : given;
  const auto request = request_for(*parent, *options);
  const auto keys = c10::make_intrusive<PatientStore>(name, store);
  auto own = connect_backend(*parent, "connecting a reducer's communicator", request.timeout, [=] {
    HostLinks links = connect_host(attached ? *attached : *given, gloo, keys, request.timeout);
    if (links.channel && !links.column)  // it has all that a reducer uses
      return c10::make_intrusive<HostBackend>(request, nullptr, std::move(links));
    if (!gloo) return HostBackendPtr();
    auto made = distributed::make_gloo_backend_like(*gloo, keys, request.rank, request.size);
    meet(*made);
    return c10::make_intrusive<HostBackend>(request, std::move(made), std::move(links));
  });
  if (!own) return parent;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(keys, request.rank, request.size);
  group->setDefaultBackend(BackendType::CUSTOM);
  group->setBackend(at::kCPU, BackendType::CUSTOM, own);
  // Before other backends are added, which keep their name and device.
  group->setGroupName(name);
  group->setBoundDeviceId(parent->getBoundDeviceId());
  for (const c10::Device& device : parent->getDeviceTypes()) {
    if (device.is_cpu()) continue;
    const BackendPtr other = parent->getBackend(device.type());
    const bool nccl = detail::is_nccl(other->getBackendName());
    group->setBackend(device.type(), nccl ? BackendType::NCCL : BackendType::UNDEFINED, other);
  }
  return group;
}

HostBackendPtr host_backend_of(const c10d::ProcessGroup& given) {
  if (given.getSize() == 1) return nullptr;
  auto& group = const_cast<c10d::ProcessGroup&>(given);
  const BackendPtr on_cpu =
      detail::has_backend(group, at::kCPU) ? group.getBackend(at::kCPU) : nullptr;
  if (auto* const own = dynamic_cast<HostBackend*>(on_cpu.get())) {
    if (!find_watched(group)) remember_processes(group, own->processes());
    return HostBackendPtr::reclaim_copy(own);
  }
  const WatchedGroupPtr known = watched(group);
  if (!known) return nullptr;
  // Held while the ranks meet; per group, since groups may meet concurrently.
  const std::lock_guard<std::mutex> lock(known->attaching);
  if (known->attached) return *std::static_pointer_cast<HostBackendPtr>(known->attached);
  HostBackendPtr made;
  if (const auto options = on_cpu ? distributed::gloo_options(*on_cpu) : nullptr) {
    const auto request = request_for(group, *options);
    const char* const what = "handshake of ranks that may share memory";
    made = connect_backend(group, what, request.timeout, [=] {
      return c10::make_intrusive<HostBackend>(
          request, nullptr, connect_host(*on_cpu, nullptr, nullptr, request.timeout));
    });
    remember_processes(group, made->processes());
    if (!made->shares_memory()) made.reset();
  }
  known->attached = std::make_shared<HostBackendPtr>(made);
  return made;
}

}  // namespace apex::parallel
