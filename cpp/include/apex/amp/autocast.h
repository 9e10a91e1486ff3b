// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <apex/export.h>

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
/// them: autocast is a thread-local setting. An exception that leaves the scope also restores the
/// previous state.
///
/// Casts of parameters are cached until the outermost guard ends, so that a second use is free. A
/// guard that changes the dtype clears the cache. Does not block.
class APEX_API AutocastGuard {
 public:
  /// @param device_type the device type whose operators are affected
  /// @param dtype at::kHalf or at::kBFloat16; nullopt: the thread's setting, by default at::kHalf
  ///              for CUDA and at::kBFloat16 for CPU
  /// @param enabled false: turns autocast off, for a part of a model that needs full precision
  ///                inside another guard
  /// @param cache_enabled false: does not cache casts, because a CUDA graph may need that; this
  ///                      setting of the thread holds for all device types
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
