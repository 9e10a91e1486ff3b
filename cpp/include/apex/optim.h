// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <apex/export.h>
#include <apex/parallel/detail/sharding.h>

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

/// Optimizers: LARC, and an optimizer whose state is sharded over the ranks.

namespace apex::parallel {

/// Options of LARC.
struct LARCOptions {
  LARCOptions() = default;
  /* implicit */ LARCOptions(double trust_coefficient) : trust_coefficient_(trust_coefficient) {}

  /// The largest change of a parameter in one step, relative to its norm and before the learning
  /// rate; positive.
  TORCH_ARG(double, trust_coefficient) = 0.02;
  /// True only scales the learning rate down (LARC). False always multiplies it by the local rate
  /// (LARS).
  TORCH_ARG(bool, clip) = true;
  /// Added to the gradient's norm; not negative.
  TORCH_ARG(double, eps) = 1e-8;
};

/// Adapts each parameter's learning rate to the ratio of the parameter's norm to its gradient's
/// norm, and steps an optimizer:
///
///     torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
///     apex::parallel::LARC larc(sgd);
///     sgd.zero_grad();
///     loss.backward();
///     larc.step();  // instead of sgd.step()
///
/// Algorithm: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
/// equation 6, with clipping. For a parameter p with gradient g, weight decay w, the group's
/// learning rate lr, and both norms above zero:
///
///    local = trust_coefficient * |p| / (|g| + w * |p| + eps)
///    g <- (g + w * p) * (clip ? min(local / lr, 1) : local)
///
/// The optimizer then steps with weight decay 0. A parameter whose norm or gradient norm is zero
/// keeps its gradient and gets no weight decay. Parameters without a gradient are skipped. The
/// weight decay is read from the options of torch's own optimizers only.
///
/// LARC has no state. Learning rate schedulers, zero_grad(), torch::save() and Checkpoint take the
/// optimizer itself, which must outlive this object. Parameters and gradients are dense, real and
/// floating, of any dtype; those of a group are on one device. Norms are computed in float32
/// (float64 in a group with float64). Does not block the host. Not thread safe.
class APEX_API LARC {
 public:
  /// @throws InvalidArgument for options outside of the ranges above.
  explicit LARC(torch::optim::Optimizer& optimizer, const LARCOptions& options = {});

  /// Adapts the gradients in place and steps the optimizer.
  /// @param closure passed to the optimizer; gradients are adapted after each evaluation.
  /// @return the loss; undefined without a closure.
  /// @throws InvalidArgument for a sparse, complex or integer gradient, before anything is changed,
  ///         except in the second and later evaluations of the closure. Exceptions of the optimizer
  ///         and of the closure propagate.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);

 private:
  void adapt(const std::vector<std::pair<double*, double>>& decays);  // of each group

  torch::optim::Optimizer& optimizer_;
  const LARCOptions options_;
};

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
/// Gradients must be the same on every rank, as after a backward of the wrapper. Clip and unscale
/// them as usual. The resulting parameters are bit for bit those of the plain optimizer. So is the
/// consolidated state, which loads with any number of ranks:
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
  ShardedOptimizer(const std::vector<NamedTensor>& parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Options defaults)
      : sharding_(parameters, std::move(group),
                  [defaults](std::vector<torch::optim::OptimizerParamGroup> groups) {
                    return std::make_unique<Optim>(std::move(groups), defaults);
                  }) {}

  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Options defaults)
      : ShardedOptimizer(named_tensors(module.named_parameters()), std::move(group),
                         std::move(defaults)) {}

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Steps this rank's parameters and receives the others. Collective. Blocks the host (CPU), or is
  /// enqueued on the current stream (NCCL).
  /// @throws CommunicationError; exceptions of Optim. The other ranks then throw
  ///         CommunicationError, over NCCL in a later collective. Ranks may have parameters of
  ///         different steps, and the group cannot be used any more: restart from a checkpoint.
  void step() { sharding_.step(); }

  /// Clears the gradients of all parameters.
  void zero_grad(bool set_to_none = true) { optimizer().zero_grad(set_to_none); }

  /// Collects the state of all ranks in optimizer() on rank `to` (-1: on every rank), for a
  /// checkpoint. The next step drops the other ranks' state again. Collective; blocks the host.
  /// @throws InvalidArgument if there is no such rank; CommunicationError.
  void consolidate(int64_t to = 0) { sharding_.consolidate(to); }

  /// The optimizer. It has all parameters, and the state of those that this rank steps. Its
  /// options, which schedulers may change, must be the same on every rank.
  Optim& optimizer() { return static_cast<Optim&>(sharding_.optimizer()); }
  /// The rank that steps each parameter.
  const std::vector<int64_t>& owners() const { return sharding_.owners(); }

 private:
  detail::Sharding sharding_;
};

}  // namespace apex::parallel
