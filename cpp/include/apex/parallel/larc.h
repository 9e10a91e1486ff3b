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

/// How LARC adapts learning rates.
struct LARCOptions {
  LARCOptions() = default;
  /* implicit */ LARCOptions(double trust_coefficient) : trust_coefficient_(trust_coefficient) {}

  /// Share of a parameter's norm that a step may change at most, before the learning rate;
  /// positive.
  TORCH_ARG(double, trust_coefficient) = 0.02;
  /// True: the learning rate is only ever scaled down (LARC). False: it is multiplied by the local
  /// rate, whatever that is (LARS).
  TORCH_ARG(bool, clip) = true;
  /// Added to the gradient's norm; not negative.
  TORCH_ARG(double, eps) = 1e-8;
};

/// Adapts the learning rate of every parameter to the ratio of its norm to its gradient's, around
/// any optimizer:
///
///     apex::parallel::LARC optimizer(
///         torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)));
///
/// Algorithm: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
/// equation 6, with clipping; the arithmetic of the Python class `apex.parallel.LARC.LARC`. For a
/// parameter p with gradient g, weight decay w and the group's learning rate lr, with both norms
/// above zero:
///
///    local = trust_coefficient * |p| / (|g| + w * |p| + eps)
///    g <- (g + w * p) * (clip ? min(local / lr, 1) : local)
///
/// after which the wrapped optimizer steps with weight decay 0. A parameter whose norm or gradient
/// norm is zero keeps its gradient and takes no weight decay; one without a gradient is passed by.
///
/// The wrapped optimizer's parameter groups, defaults and state belong to this object once it is
/// wrapped, and are lent to it while it steps, saves or loads. So everything that takes an
/// Optimizer works: zero_grad(), add_param_group(), learning rate schedulers, and torch::save and
/// torch::load, whose archives are those of the wrapped optimizer alone: LARC keeps no state of its
/// own.
///
/// Parameters and gradients: dense, real, floating, any mix of dtypes and devices. Norms are
/// computed in float32 (float64 for float64), by one multi-tensor operation per group, device and
/// dtype. Weight decay is known of the options of torch's own optimizers; a group with options of
/// another class counts as one without.
///
/// Nothing is copied to the host, and LARC itself does not block it. Not thread safe.
class APEX_API LARC : public torch::optim::Optimizer {
 public:
  /// Takes an optimizer over.
  /// @throws InvalidArgument if there is none, or for options outside of the ranges above.
  explicit LARC(std::unique_ptr<torch::optim::Optimizer> optimizer,
                const LARCOptions& options = {});

  /// Takes a temporary, or an optimizer that was moved: LARC(torch::optim::SGD(...)).
  template <typename Wrapped,
            typename = std::enable_if_t<std::is_base_of_v<torch::optim::Optimizer, Wrapped> &&
                                        !std::is_same_v<LARC, Wrapped> &&
                                        !std::is_lvalue_reference_v<Wrapped>>>
  explicit LARC(Wrapped&& optimizer, const LARCOptions& options = {})
      : LARC(std::unique_ptr<torch::optim::Optimizer>(
                 std::make_unique<Wrapped>(std::forward<Wrapped>(optimizer))),
             options) {}

  ~LARC() override;
  /// One that was moved from has no parameters; step(), save() and load() throw apex::Error.
  LARC(LARC&& other);
  LARC& operator=(LARC&& other);

  const LARCOptions& options() const { return options_; }

  /// Adapts the gradients in place and runs the wrapped optimizer's step.
  /// @param closure passed on; the gradients are adapted after each evaluation. It may use this
  ///        object, but not call step(), save() or load().
  /// @return what the wrapped optimizer returns: the loss, undefined without a closure.
  /// @throws InvalidArgument if a gradient is sparse, complex or integer: before anything is
  ///         changed, unless it is the closure's second evaluation or a later one. Whatever the
  ///         wrapped optimizer and the closure throw.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// As the wrapped optimizer would.
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
