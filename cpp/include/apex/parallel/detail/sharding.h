// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <apex/export.h>
#include <apex/parallel/detail/model_sync.h>

/// What optimizers whose state is sharded have in common, in both languages.

namespace apex::parallel {

/// Returns the rank that steps each parameter: the most expensive remaining parameter goes to the
/// rank with the least cost (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
/// Pure; the same result on every rank.
///
/// @param costs  of each parameter's step, such as its number of elements; not negative.
/// @throws InvalidArgument if `ranks` < 1.
APEX_API std::vector<int64_t> assign_owners(const std::vector<int64_t>& costs, int64_t ranks);

/// Sends each tensor from its owner to all ranks, bit for bit, in one coalesced broadcast per owner
/// and device. Strides must be the same on every rank. Collective; blocks the host (CPU) or is
/// enqueued on the current stream (NCCL). Errors name the operation `what`.
/// @param owners  the rank of each tensor.
/// @throws InvalidArgument for another number of owners, or a null group; CommunicationError.
APEX_API void broadcast_from_owners(const std::vector<at::Tensor>& tensors,
                                    const std::vector<int64_t>& owners,
                                    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                    const std::string& what);

/// Makes pending and later collectives of `group` throw on every rank, with the text `why` and this
/// rank's number. Does not block. Over NCCL, only later collectives throw.
APEX_API void fail_group(const c10d::ProcessGroup& group, const std::string& why) noexcept;

namespace detail {

/// The part of ShardedOptimizer, which documents it, that does not depend on the optimizer's class.
class APEX_API Sharding {
 public:
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>)>;

  /// @param make  constructs an optimizer like the one that is sharded.
  Sharding(const std::vector<NamedTensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
           Make make);

  void step();
  void consolidate(int64_t to);
  torch::optim::Optimizer& optimizer() const { return *optimizer_; }
  const std::vector<int64_t>& owners() const { return owners_; }

 private:
  bool is_own(size_t i) const { return owners_[i] == group_->getRank(); }
  void drop_others();

  std::vector<at::Tensor> parameters_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Make make_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<int64_t> owners_;
};

}  // namespace detail
}  // namespace apex::parallel
