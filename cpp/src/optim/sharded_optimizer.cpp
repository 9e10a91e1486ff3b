// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/sharded_optimizer.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <apex/error.h>

#include "watch/watcher.h"

namespace apex::parallel {

std::vector<int64_t> assign_owners(const std::vector<int64_t>& costs, int64_t ranks) {
  if (ranks < 1) throw InvalidArgument("assign_owners: there is no rank");
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t left, size_t right) { return costs[left] > costs[right]; });
  std::vector<int64_t> load(static_cast<size_t>(ranks)), owners(costs.size());
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[i];
    owners[i] = least - load.begin();
  }
  return owners;
}

void broadcast_from_owners(const std::vector<at::Tensor>& tensors,
                           const std::vector<int64_t>& owners,
                           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           const std::string& what) {
  if (!group) throw InvalidArgument(what + ": the process group is null");
  if (owners.size() != tensors.size()) {
    throw InvalidArgument(what + ": " + std::to_string(owners.size()) + " owners for " +
                          std::to_string(tensors.size()) + " tensors");
  }
  for (int64_t owner = 0; owner < group->getSize(); ++owner) {
    std::vector<at::Tensor> sent;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (owners[i] != owner) continue;
      const at::Tensor& tensor = tensors[i];
      // In the order of its memory, which needs no copy.
      sent.push_back(tensor.is_non_overlapping_and_dense()
                         ? tensor.detach().as_strided({tensor.numel()}, {1})
                         : tensor);
    }
    if (!sent.empty()) broadcast_coalesced(sent, group, owner, kBroadcastBytes, what);
  }
}

void fail_group(const c10d::ProcessGroup& group, const std::string& why) noexcept {
  // The first failure is the cause of later ones.
  if (group.getSize() > 1 && !has_failed(group)) announce_failure(group, why);
}

}  // namespace apex::parallel
