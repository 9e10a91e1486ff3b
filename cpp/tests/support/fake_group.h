// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing::fake {

/// A process group for tensors of the fake device, as seen from rank 0 of `world_size`. The other
/// ranks are mirror images that pass the same tensors. So a sum is world_size times the tensor, and
/// a gathered tensor is the rank's own, repeated. A broadcast from another rank delivers what this
/// rank has broadcast before, if that had the same size in bytes.
///
/// Stream order is that of NCCL. Each collective is enqueued on the group's own stream, which waits
/// for the current stream. Work::wait() makes the current stream wait, never the host. Tensors are
/// kept until wait() (or, without wait(), for the group's stream). A future's value is ready on the
/// stream that waits for it.
///
/// With the name of an NCCL backend, it averages like NCCL: it multiplies by 1/N before the sum,
/// and rounds both 1/N and the products to the dtype.
struct MirrorRules {
  std::string backend_name = "mirror";
  /// The group keeps works and tensors after wait() until it is destroyed. torch's nccl2 keeps them
  /// until its watchdog has checked them.
  bool holds_what_it_had = false;
  std::shared_ptr<std::vector<std::string>> issued = {};  ///< receives the name of each collective
};
c10::intrusive_ptr<c10d::ProcessGroup> make_mirror_group(int world_size, const std::string& name,
                                                         const MirrorRules& rules = {});

}  // namespace apex::testing::fake
