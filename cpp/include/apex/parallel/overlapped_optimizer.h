// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <apex/export.h>
#include <apex/parallel/reducer.h>

namespace apex::parallel {

/// Overlaps the last buckets of a backward with the next forward. backward() returns when the last
/// bucket is launched. step() updates the parameters whose gradients have arrived. The remaining
/// parameters are updated part by part, when forward waits for them:
///
///     apex::parallel::DistributedDataParallel model(
///         Net(), apex::parallel::DistributedDataParallelOptions().bucket_cap_mb(2));
///     torch::optim::SGD sgd(model.parameters(), 0.1);
///     apex::parallel::OverlappedOptimizer optimizer(sgd, model.reducer());
///     for (const auto& [x, y] : batches) {
///       optimizer.zero_grad();
///       // Net::forward() calls optimizer.wait_for(*fc1) before fc1(x), and so on for every layer.
///       loss_of(model.forward(x), y).backward();
///       optimizer.step();
///     }
///     optimizer.synchronize();
///
/// C++ modules have no forward hooks, so forward() must call wait_for() itself. If it uses a
/// parameter without that call, the next backward throws. Until the updates are done, gradients and
/// parameters are not final: call synchronize() before reading, changing, saving or clipping them.
/// With the same bucket plan, results are bit for bit those of the wrapped optimizer alone.
/// Reducer::set_deferred() lists the cases in which backward still waits.
///
/// Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
/// Acceleration", SOSP 2019. Not thread safe. At most one per reducer, and the same on every rank.
class APEX_API OverlappedOptimizer {
 public:
  /// Both arguments must outlive this object, which takes over the reducer's bucket callback. The
  /// optimizer must step each parameter independently (torch::optim::LBFGS does not). The options
  /// of its groups are those at step(), even if a scheduler changes them before the last update.
  /// @throws InvalidArgument if the reducer already has an OverlappedOptimizer, or after
  ///         set_deferred() on it.
  OverlappedOptimizer(torch::optim::Optimizer& optimizer, Reducer& reducer);

  /// Performs the remaining updates, unless communication fails, and restores the reducer's
  /// settings.
  ~OverlappedOptimizer();
  OverlappedOptimizer(const OverlappedOptimizer&) = delete;
  OverlappedOptimizer& operator=(const OverlappedOptimizer&) = delete;

  /// Updates the parameters whose gradients have arrived. The other parameters are updated when
  /// their gradients arrive.
  void step();

  /// Clears gradients. A gradient that a pending update still needs is cleared after that update.
  /// Do not clear gradients in any other way: an update would be lost.
  /// @throws Error from wait_for(), synchronize() or the next backward if they were cleared in
  ///         another way.
  void zero_grad(bool set_to_none = true);

  /// Returns when the gradients of these parameters are complete and their pending updates are
  /// done. Ignores parameters that the reducer does not have. On CPU backends the host waits, on
  /// NCCL the stream.
  void wait_for(const std::vector<at::Tensor>& parameters);
  void wait_for(const torch::nn::Module& module) { wait_for(module.parameters()); }

  /// The same for all parameters.
  void synchronize();

  /// The wrapped optimizer.
  const torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// The wrapped optimizer's archive, after synchronize(); for torch::save() and torch::load().
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  using Tensors = std::unordered_set<const c10::TensorImpl*>;
  using Settings = std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>;

  struct Later {
    Tensors parameters;
    Settings settings;
    std::optional<bool> clear;  ///< zero_grad() was called, with this set_to_none
  };

  void arrived(const ReducedBucket& bucket);
  void update(const Tensors& parameters, const Settings* settings);
  Settings settings() const;
  Tensors in_flight() const;

  torch::optim::Optimizer& optimizer_;
  Reducer& reducer_;
  std::unordered_map<const c10::TensorImpl*, int64_t> index_;
  std::optional<Later> later_;
};

APEX_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const OverlappedOptimizer& optimizer);
APEX_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    OverlappedOptimizer& optimizer);

}  // namespace apex::parallel
