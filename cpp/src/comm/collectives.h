// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Every collective that this package calls, and every wait for one: with errors that say which
/// rank, which operation and who is lost; see Note [Who is lost].

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

#include "comm/named_collective.h"
#include "square_sums.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

/// Throws CommunicationError that carries the rank, `what`, the cause, and what report_failure()
/// finds out, for which it blocks; call it in a catch block or with a captured exception.
inline constexpr const char* kLookAtOthers =
    "another rank has probably stopped, has fewer batches, which join() covers, or left this step; "
    "look at its output first, then start again with a new process group";
[[noreturn]] APEX_API void throw_communication_error(const std::string& what,
                                                     const c10d::ProcessGroup& group,
                                                     const std::exception_ptr& cause,
                                                     const char* advice = kLookAtOthers);

/// Why a reducer ends whose hook has failed on some ranks only.
inline constexpr const char* kHooksApart =
    "not on every rank, so the messages of the ranks do not match any more; fix the hook, then "
    "start "
    "again with a new process group and a new wrapper";

/// Whether a rank that waits in `group` hears what others report: over Gloo, with a store.
bool hears_reports(const c10d::ProcessGroup& group);

/// Issues a collective: `call()` returns its Work.
template <typename Call>
c10::intrusive_ptr<c10d::Work> call_collective(const std::string& what,
                                               const c10d::ProcessGroup& group, Call&& call) {
  begin_call(group, what);
  const NamedCollective named(what);
  try {
    return call();
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
}

/// How NCCL is to run a collective.
enum class Enqueue {
  kOnOwnStream,
  kOnCurrentStream,  ///< without an event in between; there may be no Work
};

/// The collectives, each of one tensor, in place. Those of CPU tensors take host_backend_of(),
/// whose first call waits for other ranks; besides that they do not.
c10::intrusive_ptr<c10d::Work> issue_all_reduce(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& tensor,
                                                c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM,
                                                Enqueue on = Enqueue::kOnOwnStream);
/// Where ranks share memory (ReductionTraits::shares_memory): issue_all_reduce() of floating-point
/// elements on the CPU, which are measured on the way.
c10::intrusive_ptr<c10d::Work> issue_measured_all_reduce(
    const std::string& what, c10d::ProcessGroup& group, const at::Tensor& tensor,
    c10d::ReduceOp::RedOpType op, const std::shared_ptr<SquareSums>& squares);
c10::intrusive_ptr<c10d::Work> issue_broadcast(const std::string& what, c10d::ProcessGroup& group,
                                               const at::Tensor& tensor, int64_t root);
/// Equal shares: `gathered` has world_size times the elements of `share`.
c10::intrusive_ptr<c10d::Work> issue_all_gather(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& gathered, const at::Tensor& share,
                                                Enqueue on = Enqueue::kOnOwnStream);
/// By rank so many elements each; no numbers: as many for everybody.
c10::intrusive_ptr<c10d::Work> issue_all_to_all(const std::string& what, c10d::ProcessGroup& group,
                                                const at::Tensor& received, const at::Tensor& sent,
                                                const std::vector<int64_t>& received_numel = {},
                                                const std::vector<int64_t>& sent_numel = {});

/// Waits for `work` as its backend does: the host for CPU backends, the current stream for NCCL.
/// Over Gloo it gives up when another rank has reported a failure of the group: those who failed
/// are not to be waited for. If it takes long, `meanwhile` is called now and then, and may throw
/// RankMismatch to end the wait.
APEX_API void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                              const c10d::ProcessGroup& group,
                              const std::function<void()>& meanwhile = {});

/// How long threads of this process have blocked so far, because other ranks were not there yet, in
/// wait_collective() and wait_future(). Of all threads, since a step may go from one to another.
std::chrono::nanoseconds time_waited() noexcept;

/// Issues a collective by `issue()` and waits for it; `issue` may give no Work.
template <typename Issue>
void run_collective(const std::string& what, const c10d::ProcessGroup& group, Issue&& issue) {
  if (const c10::intrusive_ptr<c10d::Work> work = issue()) wait_collective(work, what, group);
}

/// Broadcasts `parts`, flat tensors of bytes on one device, together, and waits. Returns which of
/// them this rank has written: on the CPU those whose bytes differ from the root's.
std::vector<bool> broadcast_changes(const std::string& what, c10d::ProcessGroup& group,
                                    const std::vector<at::Tensor>& parts, int64_t root);

/// HostBackend::all_gather_parts() of bytes on the CPU, where ranks share memory; waits.
void all_gather_parts(const std::string& what, c10d::ProcessGroup& group,
                      const std::vector<std::vector<at::Tensor>>& parts, const at::Tensor& staged);

/// Waits until `ended_within(slice)` returns true: for something that the ranks of `group` do
/// together without a collective of it, such as to connect. There is no connection yet that breaks
/// when a rank is killed: so it fails soon after a process of this host has ended, and besides that
/// as wait_collective() does. Slices are short. The processes are known after remember_processes().
void wait_for_ranks(const std::string& what, const c10d::ProcessGroup& group,
                    const std::function<bool(std::chrono::milliseconds slice)>& ended_within);

/// wait_collective() for the future of a communication hook. Returns also if that completed with an
/// error; throws if other ranks have reported a failure meanwhile.
void wait_future(c10::ivalue::Future& future, const std::string& what,
                 const c10d::ProcessGroup& group);

}  // namespace apex::parallel
