// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <apex/export.h>

namespace apex::amp {

/// A differentiable `tensor.to(dtype)` for parameters, which also supports sparse gradients, such
/// as those of an embedding. The gradient has the dtype of `tensor`, and keeps its layout. Any
/// shape, device and floating dtypes. Enqueued on the current stream; does not block. Thread safe.
///
///     const torch::Tensor low = apex::amp::cast(model.parameters()[0], torch::kBFloat16);
APEX_API at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace apex::amp
