// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// target[i] = source[i], for equal shapes, any dtypes, and one device. On the CPU a copy is one
/// pass over the memory if the layouts are equal, without an operator dispatch per tensor (which
/// costs more than a small copy). On other devices it uses multi-tensor launches. Consumes its
/// arguments.
void multi_tensor_copy(std::vector<at::Tensor> targets, std::vector<at::Tensor> sources);

/// target = source by one pass over the memory, without an operator dispatch. Supports CPU tensors
/// of the same dtype and layout, without gaps. Otherwise does nothing and returns false.
bool copy_in_one_pass(const at::Tensor& target, const at::Tensor& source);

/// The largest magnitude of all real numbers in each tensor, which has at least one, in float64 on
/// the first tensor's device. Does not block the host.
at::Tensor max_norms_of(std::vector<at::Tensor> values);

}  // namespace apex::parallel
