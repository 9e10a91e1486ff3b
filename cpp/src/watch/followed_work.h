// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives that the host does not wait for.

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel {

// Note [Collectives that the host does not wait for]
//
// wait() of NCCL's makes a stream wait, and returns. Where a rank is gone, the GPU waits for it,
// and the host as soon as it asks the GPU for something; within a host NCCL does not notice, and
// torch's watchdog ends the process after the timeout, ten minutes, without naming anybody. So a
// thread looks now and then whether what was launched has completed. If not, it looks at what
// others report, and at the processes of its host, as a rank does that waits by itself. When one
// has failed or has ended, this rank reports so, says it on standard error, and aborts the group's
// communicators: the GPU goes on, with whatever its buffers hold, and the group's next collective
// raises an error that names who is gone.
//
// A rank may end after its last collective, while the GPUs of others still work on it: so a process
// that has ended is proof only when nothing has completed for two seconds more.

/// After wait() of the collective `what` of `group`, on the thread that called it: what its stream
/// does next waits for that. Nothing while a graph is captured, or without NCCL.
APEX_API void follow_work(const c10d::ProcessGroup& group, const std::string& what) noexcept;

}  // namespace apex::parallel
