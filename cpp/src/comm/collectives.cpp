// SPDX-License-Identifier: BSD-3-Clause
#include "comm/collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>

#include <apex/error.h>

#include "comm/separate_group.h"
#include "distributed/backends.h"
#include "error_text.h"
#include "interruption.h"
#include "tensor_memory.h"
#include "torch_version.h"
#include "watch/timing.h"
#include "watch/watched_group.h"

namespace apex::parallel {

namespace {

std::atomic<int64_t> waited_ns{0};

/// A wait that counts for time_waited().
struct TimedWait {
  Wait wait;
  ~TimedWait() {
    waited_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - wait.since).count();
  }
};

/// Whether the host waits for the group's collectives and may stop waiting without harm. Other
/// backends abort the communicator when a wait times out.
bool can_stop_waiting(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (!detail::has_backend(group, at::kCPU)) return false;
  const auto devices = mutable_group.getDeviceTypes();
  return std::all_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return distributed::gloo_options(*mutable_group.getBackend(device.type())) != nullptr;
  });
}

/// Whether wait() blocks the current stream instead of the host: NCCL.
bool host_does_not_wait(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  return detail::has_backend(group, at::kCUDA) &&
         detail::is_nccl(mutable_group.getBackend(at::kCUDA)->getBackendName());
}

void end_if_interrupted(const c10d::ProcessGroup& group) {
  try {
    if (!is_interrupted()) return;
    throw Interrupted(rank_of(group.getRank(), group.getSize()) +
                      ": interrupted while waiting for other ranks");
  } catch (...) {
    announce_failure(group, "an interruption (Ctrl-C, or another signal)");
    throw;
  }
}

/// Calls `ended_within(slice)` until it returns true. Throws if another rank reports a failure.
/// Exceptions of an interruption and of `meanwhile` pass unchanged.
void wait_with_reports(Wait& wait, const c10d::ProcessGroup& group,
                       const std::function<bool(std::chrono::milliseconds)>& ended_within,
                       const std::function<void()>& meanwhile = {}) {
  const auto fail = [&](const std::exception_ptr& why) {
    if (meanwhile) meanwhile();  // throws if it knows why another rank has given up
    throw_communication_error(wait.what, group, why);
  };
  const auto ended = [&](std::chrono::milliseconds slice) {
    try {
      return ended_within(slice);
    } catch (...) {
      fail(std::current_exception());
    }
    return true;
  };
  if (ended(timing::kUsual)) return;
  while (!ended(timing::kSlice)) {
    end_if_interrupted(group);
    if (const std::string why = wait.poll(); !why.empty())
      fail(std::make_exception_ptr(Error(why)));
    if (meanwhile) meanwhile();
  }
}

/// The backend that carries these tensors in each collective, or null.
c10::intrusive_ptr<HostBackend> host_backend_for(const std::string& what,
                                                 const c10d::ProcessGroup& group,
                                                 at::ArrayRef<at::Tensor> tensors) {
  require_own_process(group);
  for (const at::Tensor& tensor : tensors) {
    if (has_memory(tensor)) continue;
    throw InvalidArgument(what +
                          ": the tensor has no storage (a wrapper subclass, a sparse "
                          "tensor, or one on the meta device)");
  }
  const auto fits = [](const at::Tensor& one) { return one.is_cpu() && one.is_contiguous(); };
  if (!std::all_of(tensors.begin(), tensors.end(), fits)) return nullptr;
  return host_backend_of(group);
}

HostCall host_call(const std::string& what, Enqueue on) {
  HostCall call(what);
  call.waits_at_once = on == Enqueue::kOnCurrentStream;
  return call;
}

/// The channel that carries these tensors in each collective, or null.
std::shared_ptr<HostChannel> channel_for(const std::string& what, const c10d::ProcessGroup& group,
                                         at::ArrayRef<at::Tensor> tensors) {
  const auto backend = host_backend_for(what, group, tensors);
  return backend && backend->shares_memory() ? backend->channel() : nullptr;
}

}  // namespace

std::chrono::nanoseconds time_waited() noexcept { return std::chrono::nanoseconds(waited_ns); }

std::string own_cause(const std::exception_ptr& cause) {
  const std::string why = message_of(cause);
  return why.find("gloo/transport/") == std::string::npos ? shortened(why) : std::string();
}

void throw_communication_error(const std::string& what, const c10d::ProcessGroup& group,
                               const std::exception_ptr& cause, std::string advice) {
  const std::string why = message_of(cause);
  const std::string of_hook = advice == kFixHook ? own_cause(cause) : std::string();
  if (advice == kFixHook && of_hook.empty()) advice = kLookAtOthers;
  std::string found = report_failure(group, what, of_hook);
  // With proof, other explanations would mislead.
  if (advice == kLookAtOthers && (why + found).find(" has ended (") != std::string::npos)
    advice = "see its output, then restart with a new process group";
  const size_t rank = why.rfind("rank ");
  const std::string twice = "; " + (rank == std::string::npos ? why : why.substr(rank));
  if (const size_t again = found.find(twice); again != std::string::npos)
    found.erase(again, twice.size());
  throw CommunicationError(rank_of(group.getRank(), group.getSize()) + ": " + what +
                           " failed: " + why + " (" + advice + ")" + found);
}

c10::intrusive_ptr<c10d::Work> issue_all_reduce(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& tensor,
                                                c10d::ReduceOp::RedOpType op, Enqueue on) {
  const auto backend = host_backend_for(what, group, {tensor});
  return call_collective(what, group, [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (backend && backend->can_all_reduce(tensor, op))
      return backend->all_reduce(host_call(what, on), tensor, op);
    std::vector<at::Tensor> message{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.asyncOp = on == Enqueue::kOnOwnStream;
    return group.allreduce(message, options);
  });
}

c10::intrusive_ptr<c10d::Work> issue_broadcast(const std::string& what, c10d::ProcessGroup& group,
                                               const at::Tensor& tensor, int64_t root) {
  const auto channel = channel_for(what, group, {tensor});
  return call_collective(what, group, [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (channel) return channel->broadcast(what, tensor, root);
    std::vector<at::Tensor> message{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group.broadcast(message, options);
  });
}

c10::intrusive_ptr<c10d::Work> issue_all_gather(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& gathered, const at::Tensor& share,
                                                Enqueue on) {
  const auto channel = channel_for(what, group, {gathered, share});
  c10d::AllgatherOptions options;
  options.asyncOp = on == Enqueue::kOnOwnStream;
  return call_collective(what, group, [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (channel) return channel->all_gather(host_call(what, on), {gathered}, share);
    at::Tensor output = gathered, input = share;
    if (detail::has_backend(group, output.device().type()))
      return detail::all_gather_single(group, output, input, options);
    // A group written in Python, which only has collectives of lists.
    std::vector<std::vector<at::Tensor>> outputs{output.view({-1}).chunk(group.getSize())};
    std::vector<at::Tensor> inputs{input.view({-1})};
    return group.allgather(outputs, inputs, options);
  });
}

c10::intrusive_ptr<c10d::Work> issue_all_to_all(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& received, const at::Tensor& sent,
                                                std::vector<int64_t> received_numel,
                                                std::vector<int64_t> sent_numel) {
  host_backend_for(what, group, {received, sent});  // ranks of a host learn their processes
  return call_collective(what, group, [&] {
    at::Tensor output = received, input = sent;
    return detail::all_to_all_single(group, output, input, received_numel, sent_numel);
  });
}

void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                     const c10d::ProcessGroup& group, const std::function<void()>& meanwhile) {
  require_own_process(group);
  TimedWait timed{{group, what}};
  auto* const in_memory = dynamic_cast<HostWork*>(work.get());
  // Order matters: isCompleted() must not be called during graph capture.
  const bool in_slices = !in_memory && can_stop_waiting(group) && !work->isCompleted();
  const auto ended_within = [&](std::chrono::milliseconds slice) {
    if (in_memory) return in_memory->wait_for(slice);
    if (in_slices) {
      try {
        work->wait(slice);
      } catch (...) {
        if (!work->isCompleted()) return false;  // the slice timed out
      }
    }
    if (!work->wait()) throw Error("the collective did not complete");
    return true;
  };
  wait_with_reports(timed.wait, group, ended_within, meanwhile);
  if (host_does_not_wait(group)) remember_launched(group, what, work);
}

void refuse_failed_group(const std::string& what, const c10d::ProcessGroup& group) {
  if (!has_failed(group)) return;
  throw CommunicationError(
      rank_of(group.getRank(), group.getSize()) + ": " + what +
      ": an earlier collective of this process group has failed on this rank, "
      "and other ranks may still wait in it: restart with a new process group");
}

void wait_for_ranks(const std::string& what, const c10d::ProcessGroup& group,
                    const std::function<bool(std::chrono::milliseconds)>& ended_within) {
  Wait wait(group, what, /*connects=*/true);
  wait_with_reports(wait, group, ended_within);
}

void wait_future(c10::ivalue::Future& future, const std::string& what,
                 const c10d::ProcessGroup& group) {
  require_own_process(group);
  TimedWait timed{{group, what}};
  if (can_stop_waiting(group) && !future.completed()) {
    const auto done = std::make_shared<std::promise<void>>();
    const std::future<void> ended = done->get_future();
    future.addCallback([done](c10::ivalue::Future&) { done->set_value(); });
    wait_with_reports(timed.wait, group, [&](std::chrono::milliseconds slice) {
      return ended.wait_for(slice) == std::future_status::ready;
    });
  }
  with_errors_about(what, group, [&] { future.wait(); });
}

}  // namespace apex::parallel
