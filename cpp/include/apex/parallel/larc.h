// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <apex/export.h>

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
/// equation 6, with clipping. The arithmetic is that of the Python class `apex.parallel.LARC.LARC`.
/// For a parameter p with gradient g, weight decay w, the group's learning rate lr, and both norms
/// above zero:
///
///    local = trust_coefficient * |p| / (|g| + w * |p| + eps)
///    g <- (g + w * p) * (clip ? min(local / lr, 1) : local)
///
/// The optimizer then steps with weight decay 0. A parameter whose norm or gradient norm is zero
/// keeps its gradient and gets no weight decay. Parameters without a gradient are skipped.
///
/// LARC has no state. Learning rate schedulers, zero_grad(), torch::save() and Checkpoint take the
/// optimizer itself, which must outlive this object.
///
/// Parameters and gradients may be dense, real and floating, in any mix of dtypes and devices.
/// Norms are computed in float32 (float64 for float64), with one multi-tensor operation per group,
/// device and dtype. LARC can read the weight decay from the options of torch's own optimizers
/// only; a group with options of another class counts as one without weight decay.
///
/// Copies nothing to the host and does not block it. Not thread safe.
class APEX_API LARC {
 public:
  /// @throws InvalidArgument for options outside of the ranges above.
  explicit LARC(torch::optim::Optimizer& optimizer, const LARCOptions& options = {});

  /// Adapts the gradients in place and steps the optimizer.
  /// @param closure passed to the optimizer; gradients are adapted after each evaluation.
  /// @return the optimizer's result: the loss, undefined without a closure.
  /// @throws InvalidArgument for a sparse, complex or integer gradient, before anything is changed,
  ///         except in the second and later evaluations of the closure. Exceptions of the optimizer
  ///         and of the closure propagate.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);

 private:
  /// `decays`: of each group, the place and the value.
  void adapt(const std::vector<std::pair<double*, double>>& decays);

  torch::optim::Optimizer& optimizer_;
  const LARCOptions options_;
};

}  // namespace apex::parallel
