// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
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
#include <torch/types.h>

#include <apex/error.h>
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

namespace detail {

/// Collective. Collects the state of the pieces of all ranks in `whole`, unless it is null.
APEX_API void gather_optimizer_state(const ParameterShards& shards, torch::optim::Optimizer& mine,
                                     torch::optim::Optimizer* whole,
                                     const torch::optim::OptimizerParamState& prototype);
APEX_API void take_optimizer_state(const ParameterShards& shards, torch::optim::Optimizer& mine,
                                   const torch::optim::Optimizer& whole);

}  // namespace detail

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
/// Gradients must be complete and the same on every rank, as after a backward of the wrapper. Clip
/// and unscale them as usual. The resulting parameters are bit for bit those of the plain optimizer
/// if elements are stepped independently (steps_elementwise_v). For other optimizers a rank gets
/// whole parameters.
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
  /// @param replicas  all ranks that train the model, if `group` has only some of them, such as
  ///                  distributed::new_group_of_host(). Null: `group`.
  /// @throws as ParameterShards().
  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Options defaults, c10::intrusive_ptr<c10d::ProcessGroup> replicas = {})
      : ShardedOptimizer(named_parameters_of(module), std::move(group), std::move(defaults), {},
                         steps_elementwise_v<Optim> ? Cut::kFew : Cut::kNever,
                         std::move(replicas)) {}

  /// With gradients of `reducer` reduce-scattered, see reduce_scatter().
  ///
  ///     apex::parallel::ShardedOptimizer<torch::optim::AdamW> optimizer(
  ///         *model.module(), model.process_group(), model.reducer(),
  ///         torch::optim::AdamWOptions(1e-3));
  template <typename Options>
  ShardedOptimizer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   Reducer& reducer, Options defaults)
      : ShardedOptimizer(named_parameters_of(module), std::move(group), std::move(defaults), {},
                         steps_elementwise_v<Optim> ? Cut::kEach : Cut::kNever) {
    reduce_scatter(reducer);
  }

  /// @param costs  cost of each parameter's step; empty: its number of elements. See
  ///               assign_shards().
  template <typename Options>
  ShardedOptimizer(std::vector<NamedTensor> parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Options defaults,
                   const std::vector<double>& costs = {},
                   Cut cut = steps_elementwise_v<Optim> ? Cut::kFew : Cut::kNever,
                   c10::intrusive_ptr<c10d::ProcessGroup> replicas = {})
      : parameters_(parameters),
        shards_(std::move(parameters), std::move(group), costs, cut, std::move(replicas)),
        make_([defaults](std::vector<at::Tensor> stepped) {
          return std::make_unique<Optim>(std::move(stepped), defaults);
        }),
        optimizer_(shards_.tensors(), std::move(defaults)) {}

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Steps this rank's share and receives the others. Collective. Blocks the host (CPU), or is
  /// enqueued on the current stream (NCCL).
  /// @throws CommunicationError; InvalidArgument for a sparse gradient; exceptions of Optim. The
  ///         other ranks then throw CommunicationError, over NCCL in a later collective. Parameters
  ///         have their values from before the step, or (on all ranks of a host, or over NCCL) from
  ///         after it. The group cannot be used any more.
  void step() {
    try {
      shards_.take_gradients();
      optimizer_.step();
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    } catch (...) {
      give_up("an exception that is not a std::exception");
      throw;
    }
    shards_.drop_gradients();
    shards_.publish();
    std::vector<at::Tensor> stepped;
    for (const NamedTensor& parameter : parameters_) stepped.push_back(parameter.tensor);
    Reducer::optimizer_stepped(stepped, static_cast<int64_t>(reinterpret_cast<intptr_t>(this)));
  }

  /// Replaces the all-reduce of gradients by a reduce-scatter, which sends half the bytes: after
  /// backward, a rank has the average of its share, and NaN elsewhere. Clip by clip_grad_norm_(),
  /// and clear the gradients after each step. Ranks receive as much as each other, and so wait
  /// least, with Cut::kEach or Cut::kNever. `reducer`.set_comm_hook(nullptr) ends it. Not with
  /// gradient statistics or gradient_average=false. Between backwards; every rank must make the
  /// same call.
  ///
  /// @param others  shards() of further optimizers, if not all parameters are in this one.
  /// @throws as ParameterShards::comm_hook().
  void reduce_scatter(Reducer& reducer, std::vector<const ParameterShards*> others = {}) {
    others.push_back(&shards_);
    reducer.set_comm_hook(ParameterShards::comm_hook(others, reducer));
  }

  /// Like torch::nn::utils::clip_grad_norm_() of its parameters, also after a reduce-scatter. Each
  /// rank computes the norm of its share. Collective; blocks the host (CPU).
  /// @returns the norm before clipping, [], the same on every rank.
  /// @throws CommunicationError; InvalidArgument for a sparse gradient.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) {
    const at::NoGradGuard no_grad;
    const at::Tensor norm = shards_.total_norm(shards_.gradients(), norm_type);
    const at::Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
    for (const NamedTensor& parameter : parameters_) {
      const at::Tensor& grad = parameter.tensor.grad();
      if (grad.defined()) grad.mul_(factor.to(grad.device()));
    }
    return norm;
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

  /// Collects the state of all ranks in a plain optimizer of all parameters, for a checkpoint.
  /// Collective; blocks the host.
  ///
  ///     auto whole = sharded.whole();  // on every rank
  ///     if (whole) torch::save(*whole, "optimizer.pt");
  ///
  /// @param to  the rank of the group that receives it; -1: every rank.
  /// @returns null on other ranks.
  /// @throws InvalidArgument if there is no such rank; CommunicationError.
  std::unique_ptr<Optim> whole(int64_t to = 0) {
    const auto& group = *shards_.group();
    if (to < -1 || to >= group.getSize()) {
      throw InvalidArgument("ShardedOptimizer::whole: there is no rank " + std::to_string(to) +
                            ", only 0 to " + std::to_string(group.getSize() - 1));
    }
    std::unique_ptr<Optim> result;
    if (to == -1 || to == group.getRank()) result = plain();
    // The state of a step that changes nothing, for the type of the state.
    const at::Tensor probe = torch::zeros({1});
    probe.mutable_grad() = torch::zeros({1});
    const auto of_probe = make_({probe});
    options_are(*of_probe, options());
    of_probe->step();
    if (of_probe->state().empty()) return result;  // keeps no state
    detail::gather_optimizer_state(shards_, optimizer_, result.get(),
                                   *of_probe->state().begin()->second);
    return result;
  }

  /// Takes this rank's share of the state of `whole`, which has the same parameters, and its
  /// options. Not collective; each rank loads the same file, saved with any number of ranks:
  ///
  ///     auto whole = sharded.plain();
  ///     torch::load(*whole, "optimizer.pt");
  ///     sharded.load(*whole);
  ///
  /// @throws InvalidArgument if the state of a split parameter has another shape than the
  ///         parameter. Nothing is changed then.
  void load(const Optim& whole) {
    detail::take_optimizer_state(shards_, optimizer_, whole);
    options_are(optimizer_, whole.param_groups().front().options());
  }

  /// A plain optimizer of all parameters, with these options and without state.
  std::unique_ptr<Optim> plain() {
    std::vector<at::Tensor> all;
    for (const NamedTensor& parameter : parameters_) all.push_back(parameter.tensor);
    auto result = make_(std::move(all));
    options_are(*result, options());
    return result;
  }

  /// The optimizer of this rank's share. Its options, which schedulers may change, must be the same
  /// on every rank.
  Optim& optimizer() { return optimizer_; }
  const ParameterShards& shards() const { return shards_; }

 private:
  void give_up(const std::string& why) {
    shards_.drop_gradients();
    shards_.give_up(why);
  }
  const torch::optim::OptimizerOptions& options() const {
    return optimizer_.param_groups().front().options();
  }
  static void options_are(Optim& optimizer, const torch::optim::OptimizerOptions& options) {
    optimizer.param_groups().front().set_options(options.clone());
  }
  static std::vector<NamedTensor> named_parameters_of(const torch::nn::Module& module) {
    std::vector<NamedTensor> named;
    for (const auto& item : module.named_parameters()) named.push_back({item.key(), item.value()});
    return named;
  }

  std::vector<NamedTensor> parameters_;
  ParameterShards shards_;
  std::function<std::unique_ptr<Optim>(std::vector<at::Tensor>)> make_;
  Optim optimizer_;
};

}  // namespace apex::parallel
