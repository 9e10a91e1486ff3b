// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing::fake {

/// A process group for tensors of the fake device, seen from rank 0 of `world_size`; the other
/// ranks are mirror images that pass the same tensors. So a sum is world_size times the tensor, a
/// gathered tensor is the rank's own, repeated, and what another rank broadcasts is what this one
/// has broadcast before, if that had as many bytes.
///
/// In the order of streams it is like NCCL: each collective is put into a stream of the group's
/// own, which waits for the stream that is current; Work::wait() makes the current stream wait,
/// never the host; the tensors are kept until then (or, if nobody waits for the work, for the
/// group's stream); and a future's value is ready on the stream that waits for it.
///
/// With the name of one of NCCL's backends it averages as NCCL does: it multiplies by 1/N, and
/// rounds that and the products to the dtype, before it sums.
struct MirrorRules {
  std::string backend_name = "mirror";
  /// Holds works and tensors after wait(), until it is destroyed, as torch's nccl2 does until its
  /// watchdog has looked.
  bool holds_what_it_had = false;
  std::shared_ptr<std::vector<std::string>> issued = {};  ///< gets the name of each collective
};
c10::intrusive_ptr<c10d::ProcessGroup> make_mirror_group(int world_size, const std::string& name,
                                                         const MirrorRules& rules = {});

}  // namespace apex::testing::fake
