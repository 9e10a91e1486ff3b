#include <utility>

#include "comm/collectives.h"
#include "comm/host_topology.h"
#include "reducer/reduction.h"
#include "torch_version.h"

namespace apex::parallel::detail {

namespace {

class AllReduce final : public Reduction {
 public:
  AllReduce(GroupPtr group, std::shared_ptr<HostChannel> channel, bool averages)
      : group_(std::move(group)), channel_(std::move(channel)), averages_(averages) {}

  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.averages = averages_;
    traits.shares_memory = channel_ != nullptr;
    return traits;
  }

  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocator() const override {
    if (!channel_) return {};
    return [channel = channel_](int64_t numel, const at::TensorOptions& options) {
      return channel->allocate(numel, options);
    };
  }

  std::string describe() const override { return "all-reduce of bucket "; }

  void start(const BucketMessage&, const at::Tensor& tensor, const std::string& what) override {
    work_ = issue_all_reduce(what, *group_, tensor,
                             averages_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  void wait(const std::string& what, const std::function<void()>& meanwhile) override {
    if (!work_) return;
    wait_collective(work_, what, *group_, meanwhile);
    work_.reset();
  }

  bool done() const override { return work_ && work_->isCompleted() && !work_->exception(); }

  FuturePtr future() const override {
    try {
      return work_ && !channel_ ? work_->getFuture() : nullptr;
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
  const std::shared_ptr<HostChannel> channel_;  ///< that buckets take; may be null
  const bool averages_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Reduction> make_all_reduce(const ReductionSite& site) {
  const auto type = site.device.type();
  auto channel = type == at::kCPU ? host_channel_of(*site.group) : nullptr;
  // NCCL and sums in shared memory divide while they sum; others leave the division to us.
  const bool nccl = type == at::kCUDA && has_backend(*site.group, type) &&
                    is_nccl(site.group->getBackend(type)->getBackendName());
  const bool averages = site.plain_average && (nccl || channel);
  return std::make_unique<AllReduce>(site.group, std::move(channel), averages);
}

}  // namespace apex::parallel::detail
