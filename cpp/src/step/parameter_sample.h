// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A sample of parameter elements, which detects writes that do not change a version counter.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// Samples elements of strided parameters of a floating or complex dtype: 32 elements, spread over
/// 8 parameters. They show every kind of write, also one that bumps no version counter, such as
/// those of libtorch's SGD and of fused kernels. Reads of parameters on devices wait for the
/// device. Not thread safe.
class ParameterSample {
 public:
  static constexpr size_t kParameters = 8;
  static constexpr size_t kElements = 4;

  /// Samples evenly spaced elements of these parameters, with their current values.
  void watch(const std::vector<at::Tensor>& parameters);

  /// The distance that the elements have moved since watch() or the last take(): the sum of the
  /// absolute differences, 0 if no value has changed. A parameter whose dtype, device or size has
  /// changed since is ignored.
  double take();

  /// A fingerprint of the values at the last watch() or take(); 0 if there are none. It is the same
  /// on ranks with the same parameters.
  int64_t fingerprint() const;

 private:
  using Values = std::array<double, kElements>;
  struct Site {
    at::Tensor parameter;
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
    size_t count = 0;
    std::array<int64_t, kElements> offsets{};
    at::Tensor on_device;  ///< `offsets` on the parameter's device, if that is not the CPU
    Values values{};
  };

  static const void* memory_of(const at::Tensor& parameter);
  static bool read(const Site& site, Values& values);
  std::vector<std::optional<Values>> read_all() const;

  std::vector<Site> sites_;
};

}  // namespace apex::parallel
