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
///     change_received(sum, [&](const at::Tensor& part) { part.mul_(1.0 / world_size); });
void change_received(const at::Tensor& tensor,
                     const std::function<void(const at::Tensor& part)>& change);

}  // namespace apex::parallel
