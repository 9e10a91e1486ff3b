// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The exchange of sparse gradients.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "comm/membership.h"

namespace apex::parallel::detail {

/// The gradient of a parameter as a tensor with `sparse_dim` sparse dimensions. It has no entries
/// if the parameter has no gradient.
at::Tensor sparse_gradient(const at::Tensor& variable, int64_t sparse_dim);

/// The coalesced sum over ranks of coalesced sparse COO tensors of one shape. Uses one all-gather
/// of the numbers of entries, and others of the entries, padded to the largest number. Works on
/// every backend that gathers dense tensors. Blocks the host until the numbers of entries are
/// known.
at::Tensor sparse_all_reduce(const at::Tensor& mine, const GroupPtr& group);

}  // namespace apex::parallel::detail
