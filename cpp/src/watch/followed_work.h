// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Watches collectives that the host does not wait for.

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel {

// Note [Collectives that the host does not wait for]
//
// wait() of an NCCL Work makes a stream wait and returns. If a rank is gone, the GPU waits for it,
// and so does the host at its next synchronization. Within a host NCCL does not notice. torch's
// watchdog ends the process after the timeout of ten minutes without naming a rank. So a thread
// checks periodically whether launched collectives have completed. If not, it checks other ranks'
// reports and the processes of its host, like a rank that waits on the CPU. When a rank has failed
// or exited, this rank reports that, prints it to stderr, and aborts the group's communicators. The
// GPU then continues with undefined buffer contents, and the group's next collective raises an
// error that names the lost rank.
//
// A rank may exit after its last collective while other ranks' GPUs still work on it. So an exited
// process counts as lost only if nothing completes for two more seconds.

/// Call after wait() of the collective `what` of `group`, on the same thread, whose current stream
/// waits for the collective. Does nothing during graph capture or without NCCL.
APEX_API void follow_work(const c10d::ProcessGroup& group, const std::string& what) noexcept;

}  // namespace apex::parallel
