// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <apex/export.h>

namespace apex::amp {

/// While it lives, operators on one type of device run in a lower precision where that is safe:
/// matrix products and convolutions in `dtype`, losses and what else needs its range in float32 (on
/// CUDA softmax, for one), the rest in the dtype of their inputs. torch's autocast decides for
/// each.
///
///     torch::Tensor loss;
///     {
///       apex::amp::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       loss = loss_of(model.forward(x), y);
///     }
///     scaler.scale(loss).backward();
///
/// Backward runs outside of it, in the precision that forward chose. Guards nest, also for
/// different devices or dtypes, and are destroyed in reverse order, on the thread that made them:
/// autocast is a setting of the thread, which other threads do not see. An exception that leaves
/// the scope restores what was before, as any other way out.
///
/// Parameters that were cast are remembered, so that a second use costs nothing, until the
/// outermost guard ends; a guard that changes the dtype forgets those of the other one. Blocks
/// nothing.
class APEX_API AutocastGuard {
 public:
  /// @param device_type operators on this kind of device are concerned, and no others
  /// @param dtype at::kHalf or at::kBFloat16; none: the thread's setting, at first at::kHalf for
  ///        CUDA and at::kBFloat16 for CPU
  /// @param enabled false: operators run as if there was no autocast, for a part of a model that
  ///        needs its full precision inside of another guard
  /// @param cache_enabled false: no cast is remembered, which a CUDA graph may need; a setting of
  ///        the thread for all types of devices
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

}  // namespace apex::amp
