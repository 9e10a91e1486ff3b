// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Looks for gradients that are infinite or NaN: see ReducerOptions::check_finite.

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "reducer/bucket_message.h"

namespace apex::parallel::detail {

/// The first gradient of this rank that is not finite. Not thread safe.
class FiniteCheck {
 public:
  void backward_began();
  /// Looks at a packed message. Call it before its reduction starts, which may overwrite it. On the
  /// CPU it adds up the bucket, and looks at single gradients only if the sum is not finite. On a
  /// device it does not block the host.
  void look(const BucketMessage& message);
  /// Looks at the gradient of a parameter that is in no message.
  void look(int64_t parameter, const at::Tensor& gradient);
  /// The index of its parameter, or -1. Waits for a device.
  int64_t first();

 private:
  void found(int64_t parameter);

  int64_t first_ = -1;
  /// By bucket on a device: parameters, and the largest magnitudes of their gradients.
  std::vector<std::pair<std::vector<int64_t>, at::Tensor>> on_device_;
};

}  // namespace apex::parallel::detail
