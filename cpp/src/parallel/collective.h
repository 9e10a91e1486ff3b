#pragma once

/// Calling c10d and waiting for it, with errors that say which rank and which collective failed.

#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace apex::parallel {

/// Throws CommunicationError that carries the rank, `what` and the cause; call it in a catch block
/// or with a captured exception.
[[noreturn]] void throw_communication_error(const std::string& what,
                                            const c10d::ProcessGroup& group,
                                            const std::exception_ptr& cause);

/// Issues a collective: `call()` returns its Work.
template <typename Call>
c10::intrusive_ptr<c10d::Work> call_collective(const std::string& what,
                                               const c10d::ProcessGroup& group, Call&& call) {
  try {
    return call();
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
}

/// Issues an all-gather of equal shares: `gathered` has world_size times the elements of `share`.
c10::intrusive_ptr<c10d::Work> all_gather_flat(const std::string& what, c10d::ProcessGroup& group,
                                               at::Tensor gathered, at::Tensor share);

/// Waits for `work` as its backend does: the host for CPU backends, the current stream for NCCL.
void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                     const c10d::ProcessGroup& group);

}  // namespace apex::parallel
