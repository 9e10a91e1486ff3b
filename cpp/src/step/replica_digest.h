// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Digests of tensors that should be equal on all ranks, and their comparison. Without
/// communication.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/parallel/detail/model_sync.h>

namespace apex::parallel {

/// The size of the tensor's memory. 0 if it is not compared: a tensor without memory, a sparse
/// tensor, or one on meta.
int64_t bytes_of_state(const at::Tensor& tensor);

/// The digest of part `index` of `parts` equal parts of the memory of `tensors`, concatenated.
/// Never 0. A flipped bit changes the digest; on the CPU swapped words change it as well. Waits for
/// a device.
int64_t digest_of_part(const std::vector<NamedTensor>& tensors, int64_t index, int64_t parts);

std::vector<int64_t> digests_of(const std::vector<NamedTensor>& tensors);

/// The tensors and ranks that differ.
struct Divergence {
  std::vector<size_t> tensors;  ///< tensors that differ, in order
  std::vector<int> apart;       ///< ranks outside of the largest group of equal ranks
  bool majority = false;        ///< the largest group is more than half of the ranks
  int like = 0;                 ///< the first rank of the largest group
};
/// @param digests  [ranks * tensors], by rank.
Divergence find_divergence(const std::vector<int64_t>& digests, size_t ranks, size_t tensors);

}  // namespace apex::parallel
