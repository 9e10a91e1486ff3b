// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Issues and waits for every collective of this package. Errors name the rank, the operation and
/// the lost rank; see Note [Who is lost].

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <apex/export.h>

#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

inline constexpr const char* kLookAtOthers =
    "another rank has probably stopped, has fewer batches (join() covers this), or left this step; "
    "check its output first, then restart with a new process group";
/// Throws CommunicationError with the rank, `what`, the cause, and the result of report_failure(),
/// which blocks. Call it in a catch block or with a captured exception.
[[noreturn]] APEX_API void throw_communication_error(const std::string& what,
                                                     const c10d::ProcessGroup& group,
                                                     const std::exception_ptr& cause,
                                                     std::string advice = kLookAtOthers);

/// The advice when a communication hook has failed.
inline constexpr const char* kFixHook =
    "fix the hook, then restart with a new process group and a new wrapper";

/// The message of a hook's error, for the other ranks. Empty if the hook has failed because of its
/// connections to them: over Gloo, another rank is the reason.
std::string own_cause(const std::exception_ptr& cause);

/// After a failure on this rank, other ranks may still wait in the collective that failed. They
/// would take a later one for it.
/// @throws CommunicationError if has_failed(group).
APEX_API void refuse_failed_group(const std::string& what, const c10d::ProcessGroup& group);

/// Calls `call()`. Its exceptions become a CommunicationError about `what`.
template <typename Call>
auto with_errors_about(const std::string& what, const c10d::ProcessGroup& group, Call&& call) {
  try {
    return call();
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
}

/// Issues a collective: `call()` returns its Work.
template <typename Call>
c10::intrusive_ptr<c10d::Work> call_collective(const std::string& what,
                                               const c10d::ProcessGroup& group, Call&& call) {
  refuse_failed_group(what, group);
  begin_call(group, what);
  return with_errors_about(what, group, std::forward<Call>(call));
}

/// Where NCCL runs a collective, and whether the caller does something else before it waits.
enum class Enqueue {
  kOnOwnStream,
  kOnCurrentStream,  ///< the caller waits at once; no event in between; Work may be null
};

/// Collectives of one tensor, in place. CPU tensors go through host_backend_of(), whose first call
/// waits for other ranks. Later calls do not.
c10::intrusive_ptr<c10d::Work> issue_all_reduce(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& tensor,
                                                c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM,
                                                Enqueue on = Enqueue::kOnOwnStream);
c10::intrusive_ptr<c10d::Work> issue_broadcast(const std::string& what, c10d::ProcessGroup& group,
                                               const at::Tensor& tensor, int64_t root);
/// Equal shares: `gathered` has world_size times the elements of `share`.
c10::intrusive_ptr<c10d::Work> issue_all_gather(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& gathered, const at::Tensor& share,
                                                Enqueue on = Enqueue::kOnOwnStream);
/// Numbers of elements by rank; empty lists mean equal shares.
c10::intrusive_ptr<c10d::Work> issue_all_to_all(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& received, const at::Tensor& sent,
                                                std::vector<int64_t> received_numel = {},
                                                std::vector<int64_t> sent_numel = {});

/// Waits for `work`: the host waits on CPU backends, the current stream on NCCL. The host stops
/// waiting when another rank has reported a failure of the group, since the failed rank will not
/// join. During long waits `meanwhile` is called from time to time; it may throw to end the wait.
APEX_API void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                              const c10d::ProcessGroup& group,
                              const std::function<void()>& meanwhile = {});

/// Total time that threads of this process have blocked on other ranks in wait_collective() and
/// wait_future(). Summed over all threads, since a step may move between threads.
std::chrono::nanoseconds time_waited() noexcept;

/// Issues a collective with `issue()`, which may return null, and waits for it.
template <typename Issue>
void run_collective(const std::string& what, const c10d::ProcessGroup& group, Issue&& issue) {
  if (const c10::intrusive_ptr<c10d::Work> work = issue()) wait_collective(work, what, group);
}

/// Waits until `ended_within(slice)` returns true. For joint work of the ranks of `group` that is
/// not a collective, such as connecting, when no connection exists yet that would break if a rank
/// is killed. Fails soon after a process of this host has exited, and otherwise like
/// wait_collective(). Slices are short.
void wait_for_ranks(const std::string& what, const c10d::ProcessGroup& group,
                    const std::function<bool(std::chrono::milliseconds slice)>& ended_within);

/// wait_collective() for the future of a communication hook. Also returns if the future completed
/// with an error. Throws if another rank has reported a failure meanwhile.
void wait_future(c10::ivalue::Future& future, const std::string& what,
                 const c10d::ProcessGroup& group);

}  // namespace apex::parallel
