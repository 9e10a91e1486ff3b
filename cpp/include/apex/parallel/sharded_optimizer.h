// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <apex/error.h>
#include <apex/export.h>
#include <apex/parallel/detail/model_sync.h>

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

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

/// An optimizer whose work and state are sharded over the ranks of a group. Each rank steps its
/// share of the parameters, and receives the other parameters from the ranks that stepped them.
///
///     apex::parallel::DistributedDataParallel model(Net{});
///     apex::parallel::ShardedOptimizer<torch::optim::AdamW> optimizer(
///         *model.module(), model.process_group(), torch::optim::AdamWOptions(1e-3));
///     for (const auto& [x, y] : batches) {
///       optimizer.zero_grad();
///       loss_of(model.forward(x), y).backward();
///       optimizer.step();
///     }
///
/// Gradients must be complete and the same on every rank, as after a backward of the wrapper. Clip
/// and unscale them as usual. The resulting parameters are bit for bit those of the plain
/// optimizer.
///
/// A checkpoint is that of the plain optimizer, and loads with any number of ranks:
///
///     sharded.consolidate();  // on every rank
///     if (rank == 0) torch::save(sharded.optimizer(), "optimizer.pt");
///
///     torch::load(sharded.optimizer(), "optimizer.pt");  // on every rank
///
/// Algorithm: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
/// Models", SC 2020, stage 1, with whole parameters. Not thread safe.
template <typename Optim>
class ShardedOptimizer {
  static_assert(!std::is_same_v<Optim, torch::optim::LBFGS>,
                "LBFGS steps all parameters together, so its state cannot be sharded");

 public:
  /// Checks that all ranks hold the same parameters, and broadcasts rank 0's values. Collective;
  /// blocks the host.
  /// @param defaults  options of Optim, such as torch::optim::AdamWOptions(1e-3).
  /// @throws RankMismatch if ranks hold different parameters; InvalidArgument; CommunicationError.
  template <typename Options>
  ShardedOptimizer(std::vector<NamedTensor> parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Options defaults)
      : group_(std::move(group)),
        parameters_(tensors_of(parameters)),
        make_([defaults](std::vector<torch::optim::OptimizerParamGroup> groups) {
          return std::make_unique<Optim>(std::move(groups), defaults);
        }),
        optimizer_(parameters_, defaults) {
    verify_same_model(parameters, {}, group_);
    broadcast_coalesced(parameters_, group_, 0, kBroadcastBytes, "broadcast of parameters");
    std::vector<int64_t> costs;
    for (const at::Tensor& parameter : parameters_)
      costs.push_back(parameter.requires_grad() ? parameter.numel() : 0);
    owners_ = assign_owners(costs, group_->getSize());
    drop_others();
  }

  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Options defaults)
      : ShardedOptimizer(named_parameters_of(module), std::move(group), std::move(defaults)) {}

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Steps this rank's parameters and receives the others. Collective. Blocks the host (CPU), or is
  /// enqueued on the current stream (NCCL).
  /// @throws CommunicationError; exceptions of Optim. The other ranks then throw
  ///         CommunicationError, over NCCL in a later collective. Ranks may have parameters of
  ///         different steps, and the group cannot be used any more: restart from a checkpoint.
  void step() {
    drop_others();
    std::vector<at::Tensor>& stepped = optimizer_.param_groups().front().params();
    stepped.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (is_own(i)) stepped.push_back(parameters_[i]);
    }
    try {
      optimizer_.step();
      stepped = parameters_;
    } catch (const std::exception& error) {
      stepped = parameters_;
      fail_group(*group_, std::string("a step of a ShardedOptimizer: ") + error.what());
      throw;
    }
    std::vector<at::Tensor> published;
    std::vector<int64_t> owners;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].requires_grad() && !parameters_[i].grad().defined()) continue;
      published.push_back(parameters_[i]);
      owners.push_back(owners_[i]);
    }
    broadcast_from_owners(published, owners, group_, "publication of a ShardedOptimizer's step");
  }

  /// Clears the gradients of all parameters.
  void zero_grad(bool set_to_none = true) { optimizer_.zero_grad(set_to_none); }

  /// Collects the state of all ranks in optimizer() on rank `to` (-1: on every rank), for a
  /// checkpoint. The next step drops the other ranks' state again. Collective; blocks the host.
  /// @throws InvalidArgument if there is no such rank; CommunicationError.
  void consolidate(int64_t to = 0) {
    if (to < -1 || to >= group_->getSize()) {
      throw InvalidArgument("ShardedOptimizer::consolidate: there is no rank " +
                            std::to_string(to) + ", only 0 to " +
                            std::to_string(group_->getSize() - 1));
    }
    drop_others();
    std::ostringstream mine;
    torch::save(optimizer_, mine);
    for (int64_t rank = 0; rank < group_->getSize(); ++rank) {
      const bool own = rank == group_->getRank();
      std::istringstream bytes(broadcast_text(own ? mine.str() : std::string(), group_, rank,
                                              "state of a ShardedOptimizer"));
      if (own || (to != -1 && to != group_->getRank())) continue;
      const std::unique_ptr<Optim> other = make_(optimizer_.param_groups());
      other->state().clear();
      torch::load(*other, bytes);
      for (auto& [parameter, state] : other->state())
        optimizer_.state()[parameter] = std::move(state);
    }
  }

  /// The optimizer. It has all parameters, and the state of those that this rank steps. Its
  /// options, which schedulers may change, must be the same on every rank.
  Optim& optimizer() { return optimizer_; }
  /// The rank that steps each parameter.
  const std::vector<int64_t>& owners() const { return owners_; }

 private:
  bool is_own(size_t i) const { return owners_[i] == group_->getRank(); }
  void drop_others() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!is_own(i)) optimizer_.state().erase(parameters_[i].unsafeGetTensorImpl());
    }
  }
  static std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& one : named) tensors.push_back(one.tensor);
    return tensors;
  }
  static std::vector<NamedTensor> named_parameters_of(const torch::nn::Module& module) {
    std::vector<NamedTensor> named;
    for (const auto& item : module.named_parameters()) named.push_back({item.key(), item.value()});
    return named;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
  std::vector<int64_t> owners_;
  std::function<std::unique_ptr<Optim>(std::vector<torch::optim::OptimizerParamGroup>)> make_;
  Optim optimizer_;
};

}  // namespace apex::parallel
