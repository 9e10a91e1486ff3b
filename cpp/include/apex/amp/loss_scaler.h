// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::amp {

/// How a loss scale starts and changes.
struct LossScalerOptions {
  /// First scale; positive and finite.
  double init_scale = 65536.0;
  /// The scale is multiplied by this after `growth_interval` clean updates in a row; above 1.
  double growth_factor = 2.0;
  /// The scale is multiplied by this after an overflow; between 0 and 1.
  double backoff_factor = 0.5;
  /// Number of clean updates in a row before the scale grows; at least 1.
  int64_t growth_interval = 2000;
  /// Floor and cap that a change of the scale respects; none by default.
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  /// False: the scale never changes and gradients are not looked at.
  bool dynamic = true;
};

/// Scales a loss so that low-precision gradients do not underflow, unscales the gradients, notices
/// inf and nan in them, and adapts the scale.
///
/// One training step:
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(gradients);
///     scaler.synchronize(group);               // with several ranks
///     if (!scaler.overflowed()) optimizer.step();
///     scaler.update();
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
  at::Tensor scale(const at::Tensor& loss);

  /// The scale: float32, shape [1], the scaler's own memory.
  at::Tensor scale_tensor() const { return scale_; }

  /// Multiplies every gradient by 1/scale, in place, and if dynamic remembers whether one of them
  /// held inf or nan before. Any mix of floating dtypes and devices, strided, or sparse COO and
  /// coalesced; undefined ones (of parameters that were not used) are passed over. One multi-tensor
  /// operation per device and dtype.
  /// @throws InvalidArgument for a sparse gradient that is not coalesced or a dtype that is not
  ///         floating; nothing is changed then.
  void unscale_(const std::vector<at::Tensor>& grads);

  /// New float32 tensor of shape [1] on the scaler's device: above zero if a gradient since the
  /// last update() or clear_found_inf() was not finite on this rank, or after synchronize() on any.
  at::Tensor found_inf() const;

  /// Makes found_inf() the maximum over the ranks of `group`: one all-reduce of four bytes, if the
  /// scaler is dynamic. Collective: every rank of the group has to call it. CPU backends block the
  /// host, NCCL only the current stream.
  /// @throws CommunicationError if the all-reduce fails.
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

 private:
  at::Tensor& found_inf_on(at::Device device);
  void move_to(at::Device device);

  LossScalerOptions options_;
  at::Tensor scale_;           // float32 [1]
  at::Tensor growth_tracker_;  // int32 [1]
  /// float32 [1] for every device that had gradients, by device type and index.
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, at::Tensor> found_inf_;
};

}  // namespace apex::amp
