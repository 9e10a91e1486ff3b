#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::parallel {

/// The sum over ranks of sparse COO tensors of one shape, coalesced, by two all-gathers: of the number
/// of entries and of the entries, padded to the largest number. Works on every backend that gathers
/// dense tensors. Collective; blocks the host until the numbers of entries are known.
at::Tensor sparse_all_reduce(const at::Tensor& tensor,
                             const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace apex::parallel
