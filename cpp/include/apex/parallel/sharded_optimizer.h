// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <apex/parallel/parameter_shards.h>
#include <apex/parallel/reducer.h>

namespace apex::parallel {

/// Whether Optim steps each element independently of the others, so that a parameter may be split
/// between ranks. True for these optimizers of libtorch. Specialize it for your own.
template <typename Optim>
constexpr bool steps_elementwise_v =
    std::is_same_v<Optim, torch::optim::SGD> || std::is_same_v<Optim, torch::optim::Adam> ||
    std::is_same_v<Optim, torch::optim::AdamW> || std::is_same_v<Optim, torch::optim::Adagrad> ||
    std::is_same_v<Optim, torch::optim::RMSprop>;

/// An optimizer whose work and state are sharded over the ranks of a group. Each rank steps its
/// share of the parameters and receives the other shares from the ranks that stepped them.
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
/// Gradients are complete and the same on every rank, as the wrapper leaves them; clip and unscale
/// them as usual. The resulting parameters are bit for bit those of the plain optimizer if elements
/// are stepped independently (steps_elementwise_v). For other optimizers a rank gets whole
/// parameters.
///
/// Algorithm: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
/// Models", SC 2020, stage 1. Not thread safe.
template <typename Optim>
class ShardedOptimizer {
  static_assert(!std::is_same_v<Optim, torch::optim::LBFGS>,
                "LBFGS steps all parameters together, so its state cannot be sharded");

 public:
  /// Collective; blocks the host. Broadcasts rank 0's parameters.
  /// @param defaults  options of Optim, such as torch::optim::AdamWOptions(1e-3).
  /// @throws as ParameterShards().
  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Options defaults)
      : ShardedOptimizer(named_parameters_of(module), std::move(group), std::move(defaults)) {}

  /// @param costs  cost of each parameter's step; empty: its number of elements. See
  ///               assign_shards().
  template <typename Options>
  ShardedOptimizer(std::vector<NamedTensor> parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Options defaults,
                   const std::vector<double>& costs = {}, bool whole = !steps_elementwise_v<Optim>)
      : parameters_(parameters),
        shards_(std::move(parameters), std::move(group), costs, whole),
        optimizer_(shards_.tensors(), std::move(defaults)) {}

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Steps this rank's share and receives the others. Collective. Blocks the host (CPU), or is
  /// enqueued on the current stream (NCCL).
  /// @throws CommunicationError, InvalidArgument for a sparse gradient, and what Optim throws. The
  ///         other ranks then throw CommunicationError. Parameters are restored to their values
  ///         before the step, and the group cannot be used any more.
  void step() {
    try {
      shards_.take_gradients();
      optimizer_.step();
    } catch (const std::exception& error) {
      shards_.drop_gradients();
      shards_.give_up(error.what());
      throw;
    }
    shards_.drop_gradients();
    shards_.publish();
    std::vector<at::Tensor> stepped;
    for (const NamedTensor& parameter : parameters_) stepped.push_back(parameter.tensor);
    Reducer::optimizer_stepped(stepped, static_cast<int64_t>(reinterpret_cast<intptr_t>(this)),
                               /*all=*/false);
  }

  /// Clears the gradients of all parameters.
  void zero_grad(bool set_to_none = true) {
    for (const NamedTensor& parameter : parameters_) {
      at::Tensor& grad = parameter.tensor.mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none) {
        grad.reset();
      } else {
        grad.detach_().zero_();
      }
    }
  }

  /// The optimizer of this rank's share. Its options, which schedulers may change, have to be the
  /// same on every rank. torch::save() of it holds this rank's state, to be loaded with the same
  /// world size.
  Optim& optimizer() { return optimizer_; }
  const ParameterShards& shards() const { return shards_; }

 private:
  static std::vector<NamedTensor> named_parameters_of(const torch::nn::Module& module) {
    std::vector<NamedTensor> named;
    for (const auto& item : module.named_parameters()) named.push_back({item.key(), item.value()});
    return named;
  }

  std::vector<NamedTensor> parameters_;
  ParameterShards shards_;
  Optim optimizer_;
};

}  // namespace apex::parallel
