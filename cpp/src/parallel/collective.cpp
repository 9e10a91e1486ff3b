#include "parallel/collective.h"

#include <c10/util/Exception.h>

#include <apex/error.h>

namespace apex::parallel {

namespace {

std::string message_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

void throw_communication_error(const std::string& what, const c10d::ProcessGroup& group,
                               const std::exception_ptr& cause) {
  throw CommunicationError(
      "rank " + std::to_string(group.getRank()) + " of " + std::to_string(group.getSize()) + ": " +
      what + " failed: " + message_of(cause) +
      " (another rank has probably stopped, or left this step; look at its output first, then "
      "start again with a new process group)");
}

c10::intrusive_ptr<c10d::Work> all_gather_flat(const std::string& what, c10d::ProcessGroup& group,
                                               at::Tensor gathered, at::Tensor share) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // its new name is not in torch 2.11
  return call_collective(what, group, [&] { return group._allgather_base(gathered, share); });
#pragma GCC diagnostic pop
}

void wait_collective(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                     const c10d::ProcessGroup& group) {
  bool finished = false;
  try {
    finished = work->wait();
  } catch (...) {
    throw_communication_error(what, group, std::current_exception());
  }
  if (!finished) {
    throw_communication_error(
        what, group, std::make_exception_ptr(Error("the collective did not complete")));
  }
}

}  // namespace apex::parallel
