// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Computations that each rank repeats on values that all ranks have received.

#include <functional>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// Changes all of `tensor` by calls of `change(part)`, which overwrites each element of `part` by a
/// function of that element alone. Runs on this thread in the default floating-point mode; see
/// Note [Floating-point modes]. On devices other than the CPU it is a single call. For a sparse
/// tensor it changes the values.
///
///     change_received(sum, [&](const at::Tensor& part) { scale_in_place(part, 1.0 / world_size);
///     });
void change_received(const at::Tensor& tensor,
                     const std::function<void(const at::Tensor& part)>& change);

/// Multiplies each element of `tensor` by `factor` and rounds once. On the CPU,
/// Tensor::mul_(Scalar) first rounds the factor to the tensor's dtype: in bfloat16 this makes 1/3
/// 0.2 % larger.
void scale_in_place(const at::Tensor& tensor, double factor);

}  // namespace apex::parallel
