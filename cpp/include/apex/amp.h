// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

/// Mixed-precision training: a guard for torch's autocast, and a loss scaler.

namespace apex::amp {

/// RAII guard for autocast on one device type. While it lives, torch's autocast runs matrix
/// products and convolutions in `dtype`, losses and other operators that need more range in float32
/// (on CUDA softmax, for example), and all others in the dtype of their inputs.
///
///     torch::Tensor loss;
///     {
///       apex::amp::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       loss = loss_of(model.forward(x), y);
///     }
///     scaler.scale(loss).backward();
///
/// Run backward outside of the guard; it uses the dtypes that forward chose. Guards nest, also for
/// different devices or dtypes, and are destroyed in reverse order, on the thread that created
/// them: autocast is a thread-local setting. Casts of parameters are cached until the outermost
/// guard ends; a guard that changes the dtype clears the cache. Does not block.
class APEX_API AutocastGuard {
 public:
  /// @param dtype    at::kHalf or at::kBFloat16; nullopt: the thread's setting, by default
  /// at::kHalf
  ///                 for CUDA and at::kBFloat16 for CPU
  /// @param enabled  false: turns autocast off, for a part of a model that needs full precision
  /// @param cache_enabled  false: does not cache casts, on any device type; CUDA graphs may need it
  /// @throws InvalidArgument for a device type without autocast, or another dtype
  explicit AutocastGuard(at::DeviceType device_type,
                         std::optional<at::ScalarType> dtype = std::nullopt, bool enabled = true,
                         bool cache_enabled = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  at::DeviceType device_type_;
  bool enabled_before_;
  at::ScalarType dtype_before_;
  bool cache_enabled_before_;
  bool changes_dtype_;
};

/// Options of LossScaler: the initial loss scale and how it changes.
struct LossScalerOptions {
  LossScalerOptions() = default;
  /* implicit */ LossScalerOptions(double init_scale) : init_scale_(init_scale) {}

  /// Initial scale; positive and finite.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// The scale is multiplied by growth_factor (above 1) after growth_interval (at least 1) clean
  /// updates in a row, and by backoff_factor (between 0 and 1) after an overflow.
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// Bounds for changes of the scale; none by default.
  TORCH_ARG(std::optional<double>, min_scale);
  TORCH_ARG(std::optional<double>, max_scale);
  /// False: the scale is fixed and gradients are not checked.
  TORCH_ARG(bool, dynamic) = true;
};

/// A loss scaler: scales the loss so that low-precision gradients do not underflow, unscales the
/// gradients, detects inf and NaN in them, and adapts the scale.
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);  // not if a gradient overflowed
///     scaler.update();
///
/// DistributedDataParallel has averaged the gradients at this point, so every rank sees the same
/// overflow. If ranks have different gradients, call synchronize() between unscale_() and step() to
/// agree on it:
///
///     scaler.unscale_(optimizer);
///     scaler.synchronize(group);
///     scaler.step(optimizer);
///
/// Algorithm: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
///
/// The state is in one-element tensors that keep their addresses once the scaler is on its device,
/// so a step can be captured in a CUDA graph. Functions do not block the host unless documented;
/// work is enqueued on the current streams. Not thread safe.
class APEX_API LossScaler {
 public:
  /// @throws InvalidArgument for options outside the ranges above, or min_scale above max_scale.
  explicit LossScaler(const LossScalerOptions& options = {});
  ~LossScaler();
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  const LossScalerOptions& options() const { return options_; }

  /// Returns `loss`, of any shape and floating dtype, as float32 times the scale; differentiable.
  /// Moves the scaler's state to the device of the loss.
  /// @throws InvalidArgument for a loss that is undefined or on the meta device.
  at::Tensor scale(const at::Tensor& loss);

  /// The scale: float32, shape [1]. Shares the scaler's memory.
  at::Tensor scale_tensor() const { return scale_; }

  /// Multiplies every gradient by 1/scale in place. If dynamic, it also records whether one of them
  /// contained inf or NaN. Any mix of floating dtypes and devices, strided, or sparse COO and
  /// coalesced. Skips undefined gradients (of unused parameters). One multi-tensor operation per
  /// device and dtype.
  /// @throws InvalidArgument for a sparse gradient that is not coalesced, a dtype that is not
  ///         floating, or a gradient on the meta device; nothing is changed then.
  void unscale_(const std::vector<at::Tensor>& grads);

  /// The same for all gradients of an optimizer, between backward and step(), e.g. to clip them.
  /// @throws InvalidArgument on a second call for this optimizer since the last update().
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls unscale_(optimizer) unless that was done, then optimizer.step() unless overflowed().
  /// Returns whether it stepped. If dynamic, blocks the host until the gradients have been checked.
  /// All optimizers share one flag: unscale the gradients of all of them before the first step.
  /// @throws InvalidArgument on a second call for this optimizer since the last update().
  bool step(torch::optim::Optimizer& optimizer);
  /// Calls `step` instead of optimizer.step(), for a wrapper:
  /// `scaler.step(sgd, [&] { larc.step(); })`.
  bool step(torch::optim::Optimizer& optimizer, const std::function<void()>& step);

  /// New float32 tensor of shape [1] on the scaler's device: above zero if a gradient since the
  /// last update() or clear_found_inf() was not finite on this rank, or after synchronize() on any.
  at::Tensor found_inf() const;

  /// Makes found_inf() the maximum over the ranks of `group`: one all-reduce of four bytes, if the
  /// scaler is dynamic. Collective: every rank of the group must call it. CPU backends block the
  /// host, NCCL only the current stream.
  /// @throws CommunicationError if the all-reduce fails; InvalidArgument for a null group.
  void synchronize(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  /// Whether found_inf() is set. Blocks the host until the gradients have been checked.
  bool overflowed() const;
  void clear_found_inf();

  /// Adapts the scale according to found_inf(), and clears it. If not dynamic, only clears it.
  void update();

  /// The scale as a number, and the number of clean updates in a row since its last change. Block
  /// the host if the state is on another device.
  /// @throws InvalidArgument for a scale that is not positive and finite, or a negative count.
  double get_scale() const;
  void set_scale(double scale);
  int64_t growth_tracker() const;
  void set_growth_tracker(int64_t count);

  /// The scale and the number of clean updates, for torch::save() and torch::load(). Options are
  /// not saved. Block like get_scale().
  /// @throws InvalidArgument if the archive does not hold a scaler; nothing is changed then.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  at::Tensor& found_inf_on(at::Device device);
  void move_to(at::Device device);

  enum class Stage { kUnscaled, kStepped };

  LossScalerOptions options_;
  std::unordered_map<const torch::optim::Optimizer*, Stage> stages_;  // since the last update()
  at::Tensor scale_;                                                  // float32 [1]
  at::Tensor growth_tracker_;                                         // int32 [1]
  /// float32 [1] for every device that had gradients, keyed by device type and index.
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, at::Tensor> found_inf_;
};

APEX_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LossScaler& scaler);
APEX_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LossScaler& scaler);

}  // namespace apex::amp
