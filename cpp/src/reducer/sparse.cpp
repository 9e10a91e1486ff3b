// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/sparse.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>

#include "comm/collectives.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

/// `tensor` with its first dimension extended to `rows`.
at::Tensor padded(const at::Tensor& tensor, int64_t rows) {
  if (tensor.size(0) == rows) return tensor.contiguous();
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[0] = rows;
  at::Tensor result = at::zeros(shape, tensor.options());
  result.narrow(0, 0, tensor.size(0)).copy_(tensor);
  return result;
}

/// The tensors of all ranks, by rank. Complex tensors are returned as pairs of real numbers.
std::vector<at::Tensor> all_gather(at::Tensor mine, c10d::ProcessGroup& group) {
  if (mine.is_complex()) mine = at::view_as_real(mine);
  std::vector<int64_t> shape = mine.sizes().vec();
  shape.insert(shape.begin(), group.getSize());
  const at::Tensor all = at::empty(shape, mine.options());
  constexpr const char* kWhat = "all-gather of a sparse gradient";
  run_collective(kWhat, group, [&] {
    return issue_all_gather(kWhat, group, all.view({-1}), mine.contiguous().view({-1}));
  });
  return all.unbind(0);
}

}  // namespace

at::Tensor sparse_gradient(const at::Tensor& variable, int64_t sparse_dim) {
  const at::Tensor& grad = variable.grad();
  if (!grad.defined()) {
    return at::_sparse_coo_tensor_with_dims(sparse_dim, variable.dim() - sparse_dim,
                                            variable.sizes(),
                                            variable.options().layout(at::kSparse));
  }
  const at::Tensor values = grad.detach();
  // All ranks exchange entries in the recorded form.
  if (values.layout() != at::kSparse || values.sparse_dim() != sparse_dim)
    return in_memory(values).to_sparse(sparse_dim);
  return values;
}

at::Tensor sparse_all_reduce(const at::Tensor& mine, const GroupPtr& group) {
  const at::Device device = control_device(group, mine.device());
  const auto counts = all_gather(
      at::full({1}, mine._nnz(), at::TensorOptions().dtype(at::kLong).device(device)), *group);
  std::vector<int64_t> entries;
  for (const at::Tensor& count : counts) entries.push_back(count.item<int64_t>());
  const int64_t most = *std::max_element(entries.begin(), entries.end());
  if (most == 0) return mine;

  const bool complex = mine.is_complex();
  const auto indices = all_gather(padded(mine.indices().t(), most), *group);
  const auto values = all_gather(padded(mine.values(), most), *group);
  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    all_indices.push_back(indices[rank].narrow(0, 0, entries[rank]));
    const at::Tensor received = complex ? at::view_as_complex(values[rank]) : values[rank];
    all_values.push_back(received.narrow(0, 0, entries[rank]));
  }
  return at::sparse_coo_tensor(at::cat(all_indices).t(), at::cat(all_values), mine.sizes(),
                               mine.options())
      .coalesce();
}

}  // namespace apex::parallel::detail
