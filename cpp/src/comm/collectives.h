#pragma once

/// Every collective that this package calls, and every wait for one: with errors that say which rank, which
/// operation and who is lost; see Note [Who is lost].

#include <exception>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <apex/export.h>

#include "comm/failure_report.h"

namespace apex::parallel {

/// Throws CommunicationError that carries the rank, `what`, the cause, and what report_failure() finds out, for which
/// it blocks; call it in a catch block or with a captured exception.
[[noreturn]] APEX_API void throw_communication_error(const std::string& what, const c10d::ProcessGroup& group,
                                                     const std::exception_ptr& cause);

/// To be added to messages that name ranks of `group`: which ranks of the job these are. Empty where they are the same.
std::string note_on_ranks(const c10d::ProcessGroup& group);

/// Issues a collective: `call()` returns its Work.
template <typename Call>
c10::intrusive_ptr<c10d::Work> call_collective(const std::string& what,
                                               const c10d::ProcessGroup& group, Call&& call) {
  begin_call(group, what);
  try {
    return call();
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
}

/// Issues an all-gather of equal shares: `gathered` has world_size times the elements of `share`.
c10::intrusive_ptr<c10d::Work> all_gather_flat(const std::string& what, c10d::ProcessGroup& group,
                                               at::Tensor gathered, at::Tensor share);

/// Waits for `work` as its backend does: the host for CPU backends, the current stream for NCCL. Over Gloo it gives up
/// when another rank has reported a failure of the group: those who failed are not to be waited for. If it takes long,
/// `meanwhile` is called now and then, and may throw RankMismatch to end the wait.
APEX_API void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                              const c10d::ProcessGroup& group, const std::function<void()>& meanwhile = {});

/// The same for a future.
void wait_future(c10::ivalue::Future& future, const std::string& what, const c10d::ProcessGroup& group);

}  // namespace apex::parallel
