// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing::fake {

/// A process group for tensors of the fake device, seen from rank 0 of `world_size`; the other
/// ranks are mirror images that pass the same tensors. So a sum is world_size times the tensor, and
/// a gathered tensor is the rank's own, repeated.
///
/// In the order of streams it is like NCCL: each collective is put into a stream of the group's
/// own, which waits for the stream that is current; Work::wait() makes the current stream wait,
/// never the host; the tensors are kept until then (or, if nobody waits for the work, for the
/// group's stream); and a future's value is ready on the stream that waits for it.
c10::intrusive_ptr<c10d::ProcessGroup> make_mirror_group(int world_size, const std::string& name);

}  // namespace apex::testing::fake
