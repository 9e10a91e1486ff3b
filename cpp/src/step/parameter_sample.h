// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A sample of parameter elements, which detects writes that do not change a version counter.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

// Note [Writes that bump no version]
//
// libtorch's SGD writes parameters through .data(), which has another version counter, and
// libtorch's optimizers have no step hooks. Versions would not show whether a program calls
// sgd.step() never, once or twice. So values are compared: 32 elements, spread over 8 parameters of
// the bucket plan, with their values in the last synchronized backward. All ranks have the same
// plan, so they sample the same elements. If all ranks have made the same steps, these elements
// have moved by the same distance.

/// Samples elements of parameters on the CPU that are strided, dense, and of a floating or complex
/// dtype. Skips other parameters. Not thread safe.
class ParameterSample {
 public:
  struct Change {
    bool any = false;     ///< an element has another value
    double distance = 0;  ///< sum of the absolute differences
  };

  static constexpr size_t kParameters = 8;
  static constexpr size_t kElements = 4;

  /// Samples evenly spaced elements of these parameters, with their current values.
  void watch(const std::vector<at::Tensor>& parameters);
  bool empty() const { return sites_.empty(); }

  /// The change since watch() or the last take(). A parameter whose dtype, device or size has
  /// changed since is ignored.
  Change take();

  /// A fingerprint of the values at the last watch() or take(); 0 if there are none. It is the same
  /// on ranks with the same parameters.
  int64_t fingerprint() const;

 private:
  struct Site {
    at::Tensor parameter;
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
    size_t count = 0;
    std::array<int64_t, kElements> offsets{};
    std::array<double, kElements> values{};
  };

  static const void* memory_of(const at::Tensor& parameter);
  static bool read(const Site& site, std::array<double, kElements>& values);

  std::vector<Site> sites_;
};

}  // namespace apex::parallel
