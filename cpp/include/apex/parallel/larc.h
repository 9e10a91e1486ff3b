// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <type_traits>
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

/// An optimizer wrapper that adapts each parameter's learning rate to the ratio of the parameter's
/// norm to its gradient's norm. It wraps any optimizer:
///
///     apex::parallel::LARC optimizer(
///         torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)));
///
/// Algorithm: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
/// equation 6, with clipping. The arithmetic is that of the Python class `apex.parallel.LARC.LARC`.
/// For a parameter p with gradient g, weight decay w, the group's learning rate lr, and both norms
/// above zero:
///
///    local = trust_coefficient * |p| / (|g| + w * |p| + eps)
///    g <- (g + w * p) * (clip ? min(local / lr, 1) : local)
///
/// The wrapped optimizer then steps with weight decay 0. A parameter whose norm or gradient norm is
/// zero keeps its gradient and gets no weight decay. Parameters without a gradient are skipped.
///
/// This object owns the wrapped optimizer's parameter groups, defaults and state. It lends them to
/// the wrapped optimizer while that steps, saves or loads. So everything that takes an Optimizer
/// works: zero_grad(), add_param_group(), learning rate schedulers, torch::save and torch::load.
/// Archives hold only the wrapped optimizer, since LARC has no state.
///
/// Parameters and gradients may be dense, real and floating, in any mix of dtypes and devices.
/// Norms are computed in float32 (float64 for float64), with one multi-tensor operation per group,
/// device and dtype. LARC can read the weight decay from the options of torch's own optimizers
/// only; a group with options of another class counts as one without weight decay.
///
/// Copies nothing to the host and does not block it. Not thread safe.
class APEX_API LARC : public torch::optim::Optimizer {
 public:
  /// Takes ownership of an optimizer.
  /// @throws InvalidArgument for null, or for options outside of the ranges above.
  explicit LARC(std::unique_ptr<torch::optim::Optimizer> optimizer,
                const LARCOptions& options = {});

  /// Takes ownership of a temporary or a moved optimizer: LARC(torch::optim::SGD(...)).
  template <typename Wrapped,
            typename = std::enable_if_t<std::is_base_of_v<torch::optim::Optimizer, Wrapped> &&
                                        !std::is_same_v<LARC, Wrapped> &&
                                        !std::is_lvalue_reference_v<Wrapped>>>
  explicit LARC(Wrapped&& optimizer, const LARCOptions& options = {})
      : LARC(std::unique_ptr<torch::optim::Optimizer>(
                 std::make_unique<Wrapped>(std::forward<Wrapped>(optimizer))),
             options) {}

  ~LARC() override;
  /// A moved-from LARC has no parameters; its step(), save() and load() throw apex::Error.
  LARC(LARC&& other);
  LARC& operator=(LARC&& other);

  const LARCOptions& options() const { return options_; }

  /// Adapts the gradients in place and runs the wrapped optimizer's step.
  /// @param closure passed to the wrapped optimizer; gradients are adapted after each evaluation.
  ///                It may use this object, but must not call step(), save() or load().
  /// @return the wrapped optimizer's result: the loss, undefined without a closure.
  /// @throws InvalidArgument for a sparse, complex or integer gradient, before anything is changed,
  ///         except in the second and later evaluations of the closure. Exceptions of the wrapped
  ///         optimizer and of the closure propagate.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Same archive as the wrapped optimizer's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  class Lent;
  torch::Tensor step_wrapped(const LossClosure& closure);
  void adapt(const std::vector<double>& decays);
  void require_wrapped() const;

  std::unique_ptr<torch::optim::Optimizer> wrapped_;
  LARCOptions options_;
};

}  // namespace apex::parallel
