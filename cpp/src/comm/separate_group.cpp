// SPDX-License-Identifier: BSD-3-Clause
#include "comm/separate_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/error.h>

#include "comm/bounded_call.h"
#include "comm/collectives.h"
#include "comm/failure_report.h"
#include "comm/host_topology.h"
#include "comm/process_state.h"
#include "distributed/backends.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using BackendType = c10d::ProcessGroup::BackendType;

/// Past the timeout, at which connecting ends by itself where the store answers.
constexpr std::chrono::milliseconds kAtTheLatest{500};

/// Threads on which backends end.
struct Endings {
  struct Ending {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> done;
    bool may_be_stuck = false;
  };
  std::mutex mutex;  ///< guards running
  std::vector<Ending> running;
  const int64_t pid = this_pid();
};

// Never destroyed: what still runs at the end of the process is waited for before.
Endings& endings() {
  static auto* all = [] {
    std::atexit(finish_dropped_groups);
    return new Endings;
  }();
  return *all;
}

// Note [Where a group ends]
//
// A Gloo backend ends by joining its threads, and these may have to let go of Python objects that
// were current when a collective was issued. Whoever drops the last reference to the group may hold
// the interpreter's lock: a graph that is freed, a wrapper or a communication hook that is
// collected. So the backend ends on a thread of its own, and the end of the process, or whoever can
// wait without a lock, waits for that thread.
class SeparateGroup final : public c10d::ProcessGroup {
 public:
  SeparateGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, BackendPtr own)
      : ProcessGroup(store, rank, size), own_(std::move(own)) {
    setDefaultBackend(BackendType::GLOO);
    setBackend(at::kCPU, BackendType::GLOO, own_);
  }

  ~SeparateGroup() override { end(); }
  /// In place of the destructor, as long as there are weak references.
  void release_resources() override { end(); }

 private:
  void end() noexcept {
    if (!own_) return;
    if (this_pid() != pid_) {  // forked: the threads that it would join are not there
      own_.release();
      return;
    }
    drop_host_channel(*this);
    const bool failed = has_failed(*this);
    ProcessGroup::release_resources();  // so that own_ is the last reference
    end_elsewhere([own = std::move(own_)]() mutable { own.reset(); }, failed);
  }

  const int64_t pid_ = this_pid();
  BackendPtr own_;
};

/// Gloo tells a rank that it is connected before the others have seen as much. If it let go of the
/// group at once, they would find a closed connection; so it does not come back before everybody is
/// there.
void meet(c10d::Backend& backend) {
  std::vector<at::Tensor> nothing{at::zeros({1}, at::kInt)};
  backend.allreduce(nothing, c10d::AllreduceOptions())->wait();
}

/// Null without Gloo. `parent` is whose ranks connect.
BackendPtr connect_backend(c10d::ProcessGroup& parent, const std::string& what,
                           const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  const BackendPtr given = parent.getBackend(at::kCPU);
  const auto timeout = distributed::gloo_timeout(*given);
  if (!timeout) return nullptr;
  // The ranks meet in the store, whose process may be stopped: its calls have no deadline.
  const auto made = std::make_shared<BackendPtr>();
  BoundedCall connect([=](const std::atomic<bool>&) {
    const BackendPtr own = distributed::make_gloo_backend_like(given, store, rank, size);
    meet(*own);
    *made = own;
  });
  const auto deadline = Clock::now() + *timeout + kAtTheLatest;
  wait_for_ranks(what, parent, [&](std::chrono::milliseconds slice) {
    const auto now = Clock::now();
    const bool ended = connect.wait_until(std::min(now + slice, deadline));
    if (!ended && now >= deadline) {
      throw Error("the ranks did not meet in the store within " + std::to_string(timeout->count()) +
                  " ms");
    }
    if (ended && connect.error()) std::rethrow_exception(connect.error());
    return ended;
  });
  return std::move(*made);
}

}  // namespace

void end_elsewhere(std::function<void()> end, bool may_be_stuck) noexcept try {
  Endings& all = endings();
  if (all.pid != this_pid()) {  // forked: what it would join is not there
    new std::function<void()>(std::move(end));
    return;
  }
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (Endings::Ending& ending : all.running) {
    if (ending.done->load()) ending.thread.join();
  }
  const auto joined = [](const Endings::Ending& ending) { return !ending.thread.joinable(); };
  all.running.erase(std::remove_if(all.running.begin(), all.running.end(), joined),
                    all.running.end());
  auto done = std::make_shared<std::atomic<bool>>(false);
  // Shared, so that it is at hand if there is no thread to be had.
  const auto called = std::make_shared<std::function<void()>>(std::move(end));
  const auto call = [called] {
    (*called)();
    *called = nullptr;
  };
  try {
    std::thread thread([done, call] {
      call();
      done->store(true);
    });
    all.running.push_back({std::move(thread), std::move(done), may_be_stuck});
  } catch (const std::system_error&) {
    call();
  }
} catch (...) {
  // There is nobody to tell.
}

c10::intrusive_ptr<c10d::ProcessGroup> connect_some(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name, int rank,
    int size) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, parent->getStore());
  BackendPtr own = connect_backend(*parent, "connecting ranks of several hosts", store, rank, size);
  if (!own) throw Error("there is no Gloo");
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setDefaultBackend(BackendType::GLOO);
  group->setBackend(at::kCPU, BackendType::GLOO, std::move(own));
  return group;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_separate_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name) {
  const auto store = parent->getStore();
  if (!store || parent->getSize() == 1 || !detail::has_backend(*parent, at::kCPU)) return parent;
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(name, store);
  BackendPtr own = connect_backend(*parent, "connecting a reducer's communicator", prefixed,
                                   parent->getRank(), parent->getSize());
  if (!own) return parent;
  c10::intrusive_ptr<c10d::ProcessGroup> group = c10::make_intrusive<SeparateGroup>(
      prefixed, parent->getRank(), parent->getSize(), std::move(own));
  // Before others are added, which keep their name and their device.
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

void finish_dropped_groups() {
  if (endings().pid != this_pid()) return;  // forked: the threads are not there
  std::vector<Endings::Ending> running;
  {
    const std::lock_guard<std::mutex> lock(endings().mutex);
    running.swap(endings().running);
  }
  for (Endings::Ending& ending : running) {
    // A collective that failed may wait for its rank until the timeout.
    ending.may_be_stuck && !ending.done->load() ? ending.thread.detach() : ending.thread.join();
  }
}

}  // namespace apex::parallel
