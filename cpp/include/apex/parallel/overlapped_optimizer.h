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

/// Lets the last buckets of a backward arrive while the next forward is already running: backward()
/// returns when the last bucket was sent, step() updates the parameters whose gradients have
/// arrived, and the others are updated when forward waits for them, part by part:
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
/// Modules in C++ have no hooks, so the waiting is written into forward; a parameter that was used
/// without it is an error in the next backward. Between backward and that, gradients and parameters
/// are not final: synchronize() before reading or changing them, saving them, or clipping. Results
/// are those without it, bit for bit with the same bucket plan. See Reducer::set_deferred() for
/// when backward waits at once.
///
/// Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
/// Acceleration", SOSP 2019. Not thread safe. At most one for a reducer, on every rank.
class APEX_API OverlappedOptimizer {
 public:
  /// Both have to outlive it. Takes the reducer's bucket callback. The optimizer has to treat each
  /// parameter by itself (torch::optim::LBFGS does not); its groups' options are those of step()
  /// even if a scheduler changes them before the last update.
  /// @throws InvalidArgument if the reducer has one already, or set_deferred() was called on it.
  OverlappedOptimizer(torch::optim::Optimizer& optimizer, Reducer& reducer);

  /// Makes the updates that are left, unless communication fails, and gives the reducer back as it
  /// was.
  ~OverlappedOptimizer();
  OverlappedOptimizer(const OverlappedOptimizer&) = delete;
  OverlappedOptimizer& operator=(const OverlappedOptimizer&) = delete;

  /// Updates the parameters whose gradients have arrived, and has the others updated when theirs
  /// do.
  void step();

  /// Clears gradients; those that are still needed, when they have been used. Do not clear them
  /// otherwise.
  /// @throws Error from wait_for(), synchronize() or the next backward if that was done: an update
  /// is lost.
  void zero_grad(bool set_to_none = true);

  /// Returns when the gradients of these parameters are complete and the updates that were asked
  /// for are made. Others than the reducer's are passed over. On CPU backends the host waits, on
  /// NCCL the stream.
  void wait_for(const std::vector<at::Tensor>& parameters);
  void wait_for(const torch::nn::Module& module) { wait_for(module.parameters()); }

  /// The same for all parameters.
  void synchronize();

  /// The wrapped optimizer.
  const torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// As the wrapped optimizer, after synchronize(); for torch::save() and torch::load().
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
