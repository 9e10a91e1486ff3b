// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

/// target[i] = source[i] * scale, shapes equal, any dtypes, one device. On the CPU one pass over
/// the memory where the layouts agree, without dispatching an operator per tensor (which costs more
/// than a small copy); on other devices multi-tensor launches. Consumes its arguments.
void multi_tensor_copy(std::vector<at::Tensor> targets, std::vector<at::Tensor> sources,
                       double scale = 1.0);

/// target = source * scale in one pass over the memory, without dispatching an operator: on the
/// CPU, for one dtype and one layout without gaps. Otherwise does nothing and returns false.
/// `squares`, if given, becomes sum_of_squares(target), of values that pass by anyway. `source` may
/// be `target`.
bool copy_in_one_pass(const at::Tensor& target, const at::Tensor& source, double scale,
                      double* squares = nullptr);

/// Of the absolute values, of a strided tensor on the CPU. See Note [Sums of squares] in the
/// source.
double sum_of_squares(const at::Tensor& tensor);

/// The memory of a non-overlapping and dense tensor as a contiguous 1-D alias, real-valued (a
/// complex tensor of n elements gives 2n).
at::Tensor flat_alias(const at::Tensor& tensor);

/// True if both lie in memory alike, element by element, without gaps.
bool same_dense_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace apex::parallel
