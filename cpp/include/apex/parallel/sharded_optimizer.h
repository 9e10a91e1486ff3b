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

/// Whether an element's step depends on nothing but that element, so that parameters may be cut:
/// those of libtorch. Specialize it for one of your own.
template <typename Optim>
constexpr bool steps_elementwise_v =
    std::is_same_v<Optim, torch::optim::SGD> || std::is_same_v<Optim, torch::optim::Adam> ||
    std::is_same_v<Optim, torch::optim::AdamW> || std::is_same_v<Optim, torch::optim::Adagrad> ||
    std::is_same_v<Optim, torch::optim::RMSprop>;

/// An optimizer whose work and state are shared out among the ranks of a group: each rank steps its
/// share of the parameters, and gets the others' from those who have stepped it.
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
/// Gradients are full and the same on every rank, as the wrapper leaves them; clip and unscale them
/// as usual. Parameters are those of the plain optimizer, bit for bit where elements are stepped by
/// themselves (steps_elementwise_v); others get whole parameters.
///
/// Algorithm: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
/// Models", SC 2020, stage 1. Not thread safe.
template <typename Optim>
class ShardedOptimizer {
  static_assert(!std::is_same_v<Optim, torch::optim::LBFGS>,
                "a step of LBFGS is one of all parameters and cannot be shared out");

 public:
  /// Collective; blocks the host. The values of the parameters are rank 0's afterwards.
  /// @param defaults  of Optim, such as torch::optim::AdamWOptions(1e-3).
  /// @throws as ParameterShards().
  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Options defaults)
      : ShardedOptimizer(named_parameters_of(module), std::move(group), std::move(defaults)) {}

  /// @param costs  of each parameter's step; empty: its number of elements. See assign_shards().
  template <typename Options>
  ShardedOptimizer(std::vector<NamedTensor> parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Options defaults,
                   const std::vector<double>& costs = {}, bool whole = !steps_elementwise_v<Optim>)
      : parameters_(parameters),
        shards_(std::move(parameters), std::move(group), costs, whole),
        optimizer_(shards_.tensors(), std::move(defaults)) {}

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Steps this rank's share and gets those of the others. Collective; blocks the host (CPU), or is
  /// enqueued on the current stream (NCCL).
  /// @throws CommunicationError, InvalidArgument for a sparse gradient, and what Optim throws: on
  /// this rank, and a CommunicationError on the others. Parameters are then those before the step,
  /// and the group cannot be used any more.
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

  /// Of all parameters.
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

  /// The optimizer of this rank's share: its options, which have to be the same on every rank, for
  /// schedulers; and its state. torch::save() of it holds this rank's share, for a run with as many
  /// ranks.
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
