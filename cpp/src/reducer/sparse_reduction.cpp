// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include <apex/parallel/model_sync.h>

#include "comm/collectives.h"
#include "reducer/reduction.h"

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

/// The coalesced sum over ranks of sparse COO tensors of one shape. Uses one all-gather of the
/// numbers of entries, and others of the entries, padded to the largest number. Works on every
/// backend that gathers dense tensors. Blocks the host until the numbers of entries are known.
at::Tensor sparse_all_reduce(const at::Tensor& tensor, const GroupPtr& group) {
  const at::Tensor mine = tensor.coalesce();
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

/// The reduction of a sparse gradient. Its size is only known when every rank has sent its number
/// of entries, and the host waits for that. So everything is exchanged in wait(), after the other
/// buckets were launched.
class SparseReduction final : public Reduction {
 public:
  explicit SparseReduction(GroupPtr group) : group_(std::move(group)) {}

  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.has_later_messages = true;
    traits.starts_at_wait = true;
    return traits;
  }
  std::string describe() const override { return "all-reduce of bucket "; }
  void start(const BucketMessage&, const at::Tensor& tensor, const std::string&) override {
    tensor_ = tensor;
  }
  void wait(const std::string&, const std::function<void()>&) override {
    if (tensor_.defined()) sum_ = sparse_all_reduce(std::exchange(tensor_, {}), group_);
  }
  void deliver(BucketMessage& bucket) override { bucket.assign(std::exchange(sum_, {})); }
  bool done() const override { return sum_.defined(); }
  void drop() noexcept override { tensor_ = sum_ = at::Tensor(); }

 private:
  const GroupPtr group_;
  at::Tensor tensor_;
  at::Tensor sum_;
};

}  // namespace

std::unique_ptr<Reduction> make_sparse_reduction(const ReductionSite& site) {
  return std::make_unique<SparseReduction>(site.group);
}

}  // namespace apex::parallel::detail
