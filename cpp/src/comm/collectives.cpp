// SPDX-License-Identifier: BSD-3-Clause
#include "comm/collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/accumulate.h>

#include <apex/error.h>

#include "comm/separate_group.h"
#include "distributed/backends.h"
#include "error_text.h"
#include "interruption.h"
#include "tensor_memory.h"
#include "torch_version.h"
#include "watch/neighbours.h"
#include "watch/timing.h"
#include "watch/watched_group.h"

namespace apex::parallel {

namespace {

std::atomic<int64_t> waited_ns{0};

class TakesTime {
 public:
  TakesTime(const c10d::ProcessGroup& group, const std::string& what) : scope_(group, what) {}
  ~TakesTime() {
    waited_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - began_).count();
  }
  TakesTime(const TakesTime&) = delete;
  TakesTime& operator=(const TakesTime&) = delete;

 private:
  const WaitScope scope_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

/// A single tensor of at least this size is received in place; others through a copy.
constexpr int64_t kInPlaceBytes = int64_t{1} << 20;
/// Largest piece of a broadcast in shared memory, whose blocks stay as large as the largest
/// message.
constexpr int64_t kPieceBytes = int64_t{32} << 20;

/// Whether the host waits for the group's collectives and may stop waiting without harm. Other
/// backends abort the communicator when a wait times out.
bool can_stop_waiting(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (!detail::has_backend(group, at::kCPU)) return false;
  const auto devices = mutable_group.getDeviceTypes();
  return std::all_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return distributed::gloo_timeout(*mutable_group.getBackend(device.type())).has_value();
  });
}

/// Whether wait() blocks the current stream instead of the host: NCCL.
bool host_does_not_wait(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  return detail::has_backend(group, at::kCUDA) &&
         detail::is_nccl(mutable_group.getBackend(at::kCUDA)->getBackendName());
}

/// An exception of the interruption check, which the handlers of other errors let pass.
struct Passing {
  std::exception_ptr error;
};

void end_if_interrupted(const c10d::ProcessGroup& group) {
  constexpr const char* kWhy = "an interruption (Ctrl-C, or another signal)";
  try {
    if (!is_interrupted()) return;
  } catch (...) {
    announce_failure(group, kWhy);
    throw Passing{std::current_exception()};
  }
  announce_failure(group, kWhy);
  throw Interrupted("rank " + std::to_string(group.getRank()) + " of " +
                    std::to_string(group.getSize()) +
                    ": interrupted while waiting for other ranks");
}

/// Calls `ended_within(slice)` until it returns true. Throws if another rank reports a failure.
void wait_with_reports(const c10d::ProcessGroup& group,
                       const std::function<bool(std::chrono::milliseconds)>& ended_within,
                       const std::function<void()>& meanwhile = {}) {
  if (ended_within(others_wait(group) ? timing::kLook : timing::kUsual)) return;
  Wait wait(group);
  while (!ended_within(timing::kSlice)) {
    end_if_interrupted(group);
    if (const std::string why = wait.poll(); !why.empty()) throw Error(why);
    if (meanwhile) meanwhile();
  }
}

/// Whether Gloo's message is about a connection that the other rank, or the network, has closed.
bool is_broken_connection(const std::string& why) {
  for (const char* part : {"closed by peer", "reset by peer", "Broken pipe"}) {
    if (why.find(part) != std::string::npos) return true;
  }
  return false;
}

bool all_on_this_host(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr known = find_watched(group);
  return known && known->board->all_on_this_host();
}

/// In a catch block: rethrows the current exception as a CommunicationError about waiting for
/// `what`, unless it already is a more specific error.
[[noreturn]] void throw_on(const std::string& what, const c10d::ProcessGroup& group) {
  try {
    throw;
  } catch (const RankMismatch&) {
    throw;
  } catch (const Interrupted&) {
    throw;
  } catch (const Passing& passing) {
    std::rethrow_exception(passing.error);
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
}

void require_memory(const std::string& what, const at::Tensor& tensor) {
  if (has_memory(tensor)) return;
  throw InvalidArgument(what +
                        ": the tensor has no storage (a wrapper subclass, a sparse tensor, or one "
                        "on the meta device)");
}

/// The backend that carries these tensors in each collective, or null.
c10::intrusive_ptr<HostBackend> host_backend_for(const std::string& what,
                                                 const c10d::ProcessGroup& group,
                                                 at::ArrayRef<at::Tensor> tensors) {
  require_own_process(group);
  for (const at::Tensor& tensor : tensors) require_memory(what, tensor);
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

/// broadcast_changes() for ranks that share memory.
std::vector<bool> broadcast_in_memory(const std::string& what, const c10d::ProcessGroup& group,
                                      HostBackend& backend, const std::vector<at::Tensor>& parts,
                                      int64_t root) {
  std::vector<bool> changed(parts.size());
  std::vector<at::Tensor> message;
  std::vector<size_t> part_of;  // per piece of the message
  int64_t bytes = 0;
  const auto send = [&] {
    const auto news = std::make_shared<std::vector<uint8_t>>(message.size());
    const auto call = [&] {
      return backend.channel()->broadcast(host_call(what, Enqueue::kOnCurrentStream), message, root,
                                          news);
    };
    wait_collective(call_collective(what, group, call), what, group);
    for (size_t i = 0; i < message.size(); ++i)
      changed[part_of[i]] = changed[part_of[i]] || (*news)[i] != 0;
    message.clear();
    part_of.clear();
    bytes = 0;
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const at::Tensor& piece : parts[i].split(kPieceBytes)) {
      if (bytes + piece.numel() > kPieceBytes) send();
      message.push_back(piece);
      part_of.push_back(i);
      bytes += piece.numel();
    }
  }
  send();
  return changed;
}

bool wait_for_work(c10d::Work& work, const c10d::ProcessGroup& group,
                   const std::function<void()>& meanwhile) {
  if (auto* const in_memory = dynamic_cast<HostWork*>(&work)) {
    wait_with_reports(
        group, [&](std::chrono::milliseconds slice) { return in_memory->wait_for(slice); },
        meanwhile);
    return true;
  }
  // Order matters: isCompleted() must not be called during graph capture.
  if (!can_stop_waiting(group) || work.isCompleted()) return work.wait();
  const auto ended_within = [&](std::chrono::milliseconds slice) {
    try {
      work.wait(slice);
      return true;
    } catch (...) {
      return work.isCompleted();  // false: the slice timed out
    }
  };
  wait_with_reports(group, ended_within, meanwhile);
  return work.wait();
}

}  // namespace

std::chrono::nanoseconds time_waited() noexcept { return std::chrono::nanoseconds(waited_ns); }

void throw_communication_error(const std::string& what, const c10d::ProcessGroup& group,
                               const std::exception_ptr& cause, const char* advice) {
  const std::string stall = stall_verdict(group);
  const std::string why = message_of(cause);
  const std::string failed = "rank " + std::to_string(group.getRank()) + " of " +
                             std::to_string(group.getSize()) + ": " + what + " failed: " + why;
  if (is_broken_connection(why) && !all_on_this_host(group)) report_at_once(failed);
  // The other ranks' errors contain the cause of a failed hook.
  std::string found =
      report_failure(group, advice == kFixHook ? what + ": " + shortened(why) : what);
  // With proof, other explanations would mislead.
  if (advice == kLookAtOthers && (why + found).find(" has ended (") != std::string::npos)
    advice = "see its output, then restart with a new process group";
  if (const size_t again = found.find("; " + why); again != std::string::npos)
    found.erase(again, why.size() + 2);
  throw CommunicationError(
      failed + " (" + advice + ")" + found + note_on_ranks(group) +
      (stall.empty() ? stall : "\nStall report before the failure:\n" + stall));
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
    if (channel) return channel->broadcast(what, {tensor}, root);
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
  const TakesTime time(group, what);
  bool finished = false;
  try {
    finished = wait_for_work(*work, group, meanwhile);
  } catch (...) {
    throw_on(what, group);
  }
  if (!finished) {
    throw_communication_error(what, group,
                              std::make_exception_ptr(Error("the collective did not complete")));
  }
  if (host_does_not_wait(group)) remember_launched(group, what, work);
}

void refuse_failed_group(const std::string& what, const c10d::ProcessGroup& group) {
  if (!has_failed(group)) return;
  throw CommunicationError(
      "rank " + std::to_string(group.getRank()) + " of " + std::to_string(group.getSize()) + ": " +
      what +
      ": an earlier collective of this process group has failed on this rank, "
      "and other ranks may still wait in it: restart with a new process group");
}

std::vector<bool> broadcast_changes(const std::string& what, c10d::ProcessGroup& group,
                                    const std::vector<at::Tensor>& parts, int64_t root) {
  const auto backend = host_backend_for(what, group, parts);
  if (backend && backend->shares_memory())
    return broadcast_in_memory(what, group, *backend, parts, root);
  const bool receives = group.getRank() != root;
  std::vector<bool> changed(parts.size(), receives);
  std::vector<int64_t> lengths;
  for (const at::Tensor& part : parts) lengths.push_back(part.numel());
  const bool where_it_lies = parts.size() == 1 && lengths[0] >= kInPlaceBytes;
  const at::Tensor flat = where_it_lies ? parts[0]
                          : receives ? at::empty({c10::sum_integers(lengths)}, parts[0].options())
                                     : at::cat(parts);
  run_collective(what, group, [&] { return issue_broadcast(what, group, flat, root); });
  if (where_it_lies || !receives) return changed;
  const std::vector<at::Tensor> received = flat.split_with_sizes(lengths);
  if (!flat.is_cpu()) {
    const c10::InferenceMode any;  // for tensors created in inference mode
    at::_foreach_copy_(parts, received);
    return changed;
  }
  // Unchanged parts are not written: a forward whose backward is pending may have saved them.
  // Compares bytes, since -0.0 equals 0.0, and a NaN does not equal itself.
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    changed[i] = std::memcmp(parts[i].const_data_ptr(), received[i].const_data_ptr(), length) != 0;
    if (changed[i]) std::memcpy(parts[i].mutable_data_ptr(), received[i].const_data_ptr(), length);
  }
  return changed;
}

void wait_for_ranks(const std::string& what, const c10d::ProcessGroup& group,
                    const std::function<bool(std::chrono::milliseconds)>& ended_within) {
  using Clock = std::chrono::steady_clock;
  const WaitScope scope(group, what);
  const WatchedGroupPtr known = find_watched(group);
  std::optional<Clock::time_point> seen;  // when a process was first seen to have exited
  try {
    wait_with_reports(group, [&](std::chrono::milliseconds slice) {
      if (ended_within(slice)) return true;
      if (!known) return false;
      if (!seen && !known->board->look_around(ProcessState::kEnded).empty()) seen = Clock::now();
      if (seen && Clock::now() - *seen > timing::kOnTheWay)
        throw Error("a process of this group has ended");
      return false;
    });
  } catch (...) {
    throw_on(what, group);
  }
}

void wait_future(c10::ivalue::Future& future, const std::string& what,
                 const c10d::ProcessGroup& group) {
  require_own_process(group);
  const TakesTime time(group, what);
  try {
    if (can_stop_waiting(group) && !future.completed()) {
      const auto done = std::make_shared<std::promise<void>>();
      const std::future<void> ended = done->get_future();
      future.addCallback([done](c10::ivalue::Future&) { done->set_value(); });
      wait_with_reports(group, [&](std::chrono::milliseconds slice) {
        return ended.wait_for(slice) == std::future_status::ready;
      });
    }
    future.wait();
  } catch (...) {
    throw_on(what, group);
  }
}

}  // namespace apex::parallel
