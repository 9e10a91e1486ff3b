#include "parallel/sparse_all_reduce.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>

#include <apex/parallel/model_sync.h>

#include "comm/collectives.h"

namespace apex::parallel {

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

std::vector<at::Tensor> all_gather(at::Tensor mine, c10d::ProcessGroup& group) {
  if (mine.is_complex()) mine = at::view_as_real(mine);
  std::vector<at::Tensor> inputs{mine};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(at::empty_like(mine));
  constexpr const char* kWhat = "all-gather of a sparse gradient";
  wait_collective(call_collective(kWhat, group, [&] { return group.allgather(outputs, inputs); }),
                  kWhat, group);
  return outputs[0];
}

}  // namespace

at::Tensor sparse_all_reduce(const at::Tensor& tensor,
                             const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const at::Tensor mine = tensor.coalesce();
  if (group->getSize() == 1) return mine;
  const at::Device device = control_device(group, mine.device());
  const auto counts =
      all_gather(at::full({1}, mine._nnz(), at::TensorOptions().dtype(at::kLong).device(device)),
                 *group);
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

}  // namespace apex::parallel
