// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What each rank computes for itself from values that all ranks have received.

#include <functional>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// Calls `change(part)`, which overwrites each element of `part` by a function of that element
/// alone, so that all of `tensor` is changed: on this thread and in the default mode, see
/// Note [Floating-point modes]. On devices other than the CPU it is one call. A sparse tensor is
/// changed in its values.
///
///     change_received(sum, [&](const at::Tensor& part) { scale_in_place(part, 1.0 / world_size);
///     });
void change_received(const at::Tensor& tensor,
                     const std::function<void(const at::Tensor& part)>& change);

/// Multiplies each element of `tensor` by `factor`, and rounds once. Tensor::mul_(Scalar), on the
/// CPU, rounds the factor to the tensor's dtype before: in bfloat16 1/3 becomes 0.2 % larger.
void scale_in_place(const at::Tensor& tensor, double factor);

}  // namespace apex::parallel
