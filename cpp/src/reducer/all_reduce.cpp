// SPDX-License-Identifier: BSD-3-Clause
#include <utility>

#include "comm/collectives.h"
#include "comm/host_topology.h"
#include "reducer/reduction.h"
#include "torch_version.h"

namespace apex::parallel::detail {

namespace {

class AllReduce final : public Reduction {
 public:
  AllReduce(GroupPtr group, std::shared_ptr<HostChannel> channel,
            std::shared_ptr<HostHierarchy> hierarchy, bool averages)
      : group_(std::move(group)),
        channel_(std::move(channel)),
        hierarchy_(std::move(hierarchy)),
        averages_(averages) {}

  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.averages = averages_;
    traits.shares_memory = channel_ != nullptr;
    traits.across_hosts = hierarchy_ != nullptr;
    return traits;
  }

  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocator() const override {
    if (hierarchy_) {
      return [hierarchy = hierarchy_](int64_t numel, const at::TensorOptions& options) {
        return hierarchy->allocate(numel, options);
      };
    }
    if (!channel_) return {};
    return [channel = channel_](int64_t numel, const at::TensorOptions& options) {
      return channel->allocate(numel, options);
    };
  }

  std::string describe() const override { return "all-reduce of bucket "; }

  void start(const BucketMessage&, const at::Tensor& tensor, const std::string& what) override {
    const auto op = averages_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    work_ = hierarchy_ ? issue_all_reduce(what, *group_, *hierarchy_, tensor, op)
                       : issue_all_reduce(what, *group_, tensor, op);
  }

  void wait(const std::string& what, const std::function<void()>& meanwhile) override {
    if (!work_) return;
    wait_collective(work_, what, *group_, meanwhile);
    work_.reset();
  }

  bool done() const override { return work_ && work_->isCompleted() && !work_->exception(); }

  FuturePtr future() const override {
    try {
      return work_ && !channel_ && !hierarchy_ ? work_->getFuture() : nullptr;
    } catch (const std::exception&) {
      return nullptr;  // not every backend has them
    }
  }

  void leave() override {
    if (auto* const work = dynamic_cast<HostWork*>(work_.get())) work->hand_over();
  }

  void drop() noexcept override { work_.reset(); }

 private:
  const GroupPtr group_;
  const std::shared_ptr<HostChannel> channel_;      ///< that buckets take; may be null
  const std::shared_ptr<HostHierarchy> hierarchy_;  ///< so; one of both is null
  const bool averages_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Reduction> make_all_reduce(const ReductionSite& site) {
  const auto type = site.device.type();
  auto channel = type == at::kCPU ? host_channel_of(*site.group) : nullptr;
  auto hierarchy = type == at::kCPU ? find_host_hierarchy(*site.group) : nullptr;
  // NCCL and sums in shared memory divide while they sum; others leave the division to us.
  const bool nccl = type == at::kCUDA && has_backend(*site.group, type) &&
                    is_nccl(site.group->getBackend(type)->getBackendName());
  const bool averages =
      site.plain_average && (nccl || channel || (hierarchy && hierarchy->averages()));
  return std::make_unique<AllReduce>(site.group, std::move(channel), std::move(hierarchy),
                                     averages);
}

}  // namespace apex::parallel::detail
