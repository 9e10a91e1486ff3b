// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
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

namespace apex::amp {

/// How a loss scale starts and changes.
struct LossScalerOptions {
  LossScalerOptions() = default;
  /* implicit */ LossScalerOptions(double init_scale) : init_scale_(init_scale) {}

  /// First scale; positive and finite.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// The scale is multiplied by this after `growth_interval` clean updates in a row; above 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// The scale is multiplied by this after an overflow; between 0 and 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Number of clean updates in a row before the scale grows; at least 1.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// Floor and cap that a change of the scale respects; none by default.
  TORCH_ARG(std::optional<double>, min_scale);
  TORCH_ARG(std::optional<double>, max_scale);
  /// False: the scale never changes and gradients are not looked at.
  TORCH_ARG(bool, dynamic) = true;
};

/// Scales a loss so that low-precision gradients do not underflow, unscales the gradients, notices
/// inf and nan in them, and adapts the scale.
///
/// One training step:
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);  // not if a gradient overflowed
///     scaler.update();
///
/// DistributedDataParallel has averaged the gradients by then, so every rank sees the same
/// overflow. Where ranks have different gradients, they have to agree, between unscale_() and
/// step():
///
///     scaler.unscale_(optimizer);
///     scaler.synchronize(group);
///     scaler.step(optimizer);
///
/// Algorithm: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2, with the
/// usual dynamic rule (back off on overflow, grow after a clean interval).
///
/// The scale, the number of clean updates and the overflow flags are one-element tensors that keep
/// their addresses once the scaler is on its device, so a step can be captured in a CUDA graph.
/// Functions block the host only where they say so; work is enqueued on the current streams. Not
/// thread safe. Copying is not possible.
class APEX_API LossScaler {
 public:
  /// @throws InvalidArgument for options outside the ranges above, or min_scale above max_scale.
  explicit LossScaler(const LossScalerOptions& options = {});
  ~LossScaler();
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  const LossScalerOptions& options() const { return options_; }

  /// `loss`, of any shape and floating dtype, as float32 times the scale; differentiable. The first
  /// call decides the device on which the scaler keeps its state; a loss on another moves it there.
  /// @throws InvalidArgument for a loss that is undefined or on the meta device.
  at::Tensor scale(const at::Tensor& loss);

  /// The scale: float32, shape [1], the scaler's own memory.
  at::Tensor scale_tensor() const { return scale_; }

  /// Multiplies every gradient by 1/scale, in place, and if dynamic remembers whether one of them
  /// held inf or nan before. Any mix of floating dtypes and devices, strided, or sparse COO and
  /// coalesced; undefined ones (of parameters that were not used) are passed over. One multi-tensor
  /// operation per device and dtype.
  /// @throws InvalidArgument for a sparse gradient that is not coalesced, a dtype that is not
  ///         floating, or a gradient on the meta device; nothing is changed then.
  void unscale_(const std::vector<at::Tensor>& grads);

  /// The same with all gradients of an optimizer: what has to be done before they are looked at,
  /// e.g. clipped, between backward and step().
  /// @throws InvalidArgument if that was done since the last update().
  void unscale_(torch::optim::Optimizer& optimizer);

  /// unscale_(optimizer) if that was not done, then optimizer.step(), unless overflowed(). Returns
  /// whether it stepped. Blocks the host until the gradients have been looked at, if dynamic. One
  /// flag serves all optimizers: unscale the gradients of all before the first step.
  /// @throws InvalidArgument if that was done since the last update().
  bool step(torch::optim::Optimizer& optimizer);

  /// New float32 tensor of shape [1] on the scaler's device: above zero if a gradient since the
  /// last update() or clear_found_inf() was not finite on this rank, or after synchronize() on any.
  at::Tensor found_inf() const;

  /// Makes found_inf() the maximum over the ranks of `group`: one all-reduce of four bytes, if the
  /// scaler is dynamic. Collective: every rank of the group has to call it. CPU backends block the
  /// host, NCCL only the current stream.
  /// @throws CommunicationError if the all-reduce fails; InvalidArgument for a null group.
  void synchronize(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  /// Whether found_inf() is set. Blocks the host until the gradients have been looked at.
  bool overflowed() const;

  /// Forgets what was found.
  void clear_found_inf();

  /// Adapts the scale to what was found, and forgets it. Does nothing else if not dynamic.
  void update();

  /// The scale as a number. Blocks the host if the state is on another device.
  double get_scale() const;
  /// @throws InvalidArgument if `scale` is not positive and finite.
  void set_scale(double scale);

  /// Clean updates in a row since the scale changed last. Blocks like get_scale().
  int64_t growth_tracker() const;
  /// @throws InvalidArgument if `count` is negative.
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
  /// float32 [1] for every device that had gradients, by device type and index.
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, at::Tensor> found_inf_;
};

APEX_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LossScaler& scaler);
APEX_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LossScaler& scaler);

}  // namespace apex::amp
