// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// Multiplies each element of `tensor`, which may be sparse, by `factor` and rounds once. On the
/// CPU, Tensor::mul_(Scalar) first rounds the factor to the tensor's dtype: in bfloat16 this makes
/// 1/3 0.2 % larger.
inline void scale_in_place(const at::Tensor& tensor, double factor) {
  const at::Tensor values = tensor.layout() == at::kSparse ? tensor._values() : tensor;
  values.mul_(at::native::wrapped_scalar_tensor(factor));  // as the right operand it stays a double
}

}  // namespace apex::parallel
