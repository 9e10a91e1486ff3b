// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <apex/export.h>

namespace apex::amp {

/// `tensor.to(dtype)` for a parameter, differentiable, also by sparse gradients, as those of an
/// embedding: the gradient arrives in the dtype of `tensor`, and in the layout that it has. Any
/// shape, device and floating dtypes. Enqueued on the current stream; blocks nothing. Thread safe.
///
///     const torch::Tensor low = apex::amp::cast(model.parameters()[0], torch::kBFloat16);
APEX_API at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace apex::amp
