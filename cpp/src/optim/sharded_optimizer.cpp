// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/detail/sharding.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/serialize.h>

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

namespace detail {
namespace {

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& one : named) tensors.push_back(one.tensor);
  return tensors;
}

}  // namespace

Sharding::Sharding(const std::vector<NamedTensor>& parameters,
                   c10::intrusive_ptr<c10d::ProcessGroup> group, Make make)
    : parameters_(tensors_of(parameters)),
      group_(std::move(group)),
      make_(std::move(make)),
      optimizer_(make_({torch::optim::OptimizerParamGroup(parameters_)})) {
  verify_same_model(parameters, {}, group_);
  broadcast_coalesced(parameters_, group_, 0, kBroadcastBytes, "broadcast of parameters");
  std::vector<int64_t> costs;
  for (const at::Tensor& parameter : parameters_)
    costs.push_back(parameter.requires_grad() ? parameter.numel() : 0);
  owners_ = assign_owners(costs, group_->getSize());
  drop_others();
}

void Sharding::step() {
  drop_others();
  std::vector<at::Tensor>& stepped = optimizer_->param_groups().front().params();
  stepped.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_own(i)) stepped.push_back(parameters_[i]);
  }
  try {
    optimizer_->step();
    stepped = parameters_;
  } catch (const std::exception& error) {
    stepped = parameters_;
    fail_group(*group_, std::string("a step of a ShardedOptimizer: ") + error.what());
    throw;
  }
  std::vector<at::Tensor> published;
  std::vector<int64_t> owners;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad() && !parameters_[i].grad().defined()) continue;
    published.push_back(parameters_[i]);
    owners.push_back(owners_[i]);
  }
  broadcast_from_owners(published, owners, group_, "publication of a ShardedOptimizer's step");
}

void Sharding::consolidate(int64_t to) {
  if (to < -1 || to >= group_->getSize()) {
    throw InvalidArgument("ShardedOptimizer::consolidate: there is no rank " + std::to_string(to) +
                          ", only 0 to " + std::to_string(group_->getSize() - 1));
  }
  drop_others();
  std::ostringstream mine;
  torch::save(*optimizer_, mine);
  for (int64_t rank = 0; rank < group_->getSize(); ++rank) {
    const bool own = rank == group_->getRank();
    std::istringstream bytes(broadcast_text(own ? mine.str() : std::string(), group_, rank,
                                            "state of a ShardedOptimizer"));
    if (own || (to != -1 && to != group_->getRank())) continue;
    const auto other = make_(optimizer_->param_groups());
    other->state().clear();
    torch::load(*other, bytes);
    for (auto& [parameter, state] : other->state())
      optimizer_->state()[parameter] = std::move(state);
  }
}

void Sharding::drop_others() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_own(i)) optimizer_->state().erase(parameters_[i].unsafeGetTensorImpl());
  }
}

}  // namespace detail
}  // namespace apex::parallel
