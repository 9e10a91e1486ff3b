// SPDX-License-Identifier: BSD-3-Clause
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "reducer/averaging.h"
#include "reducer/reduction.h"
#include "torch_version.h"

namespace apex::parallel::detail {

namespace {

class AllReduce final : public Reduction {
 public:
  AllReduce(GroupPtr group, ReductionTraits traits) : group_(std::move(group)), traits_(traits) {}

  ReductionTraits traits() const override { return traits_; }

  std::string describe() const override { return "all-reduce of bucket "; }

  void start(const BucketMessage&, const at::Tensor& tensor, const std::string& what) override {
    if (tensor.numel() == 0) return;  // empty on every rank; some backends reject it
    const auto op = traits_.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    work_ = issue_all_reduce(what, *group_, tensor, op);
  }

  void wait(const std::string& what, const std::function<void()>& meanwhile) override {
    if (!work_) return;
    wait_collective(work_, what, *group_, meanwhile);
    work_.reset();
  }

  bool done() const override { return work_ && work_->isCompleted() && !work_->exception(); }

  void drop() noexcept override { work_.reset(); }

 private:
  const GroupPtr group_;
  const ReductionTraits traits_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Reduction> make_all_reduce(const ReductionSite& site) {
  const auto type = site.device.type();
  const auto host = type == at::kCPU ? host_backend_of(*site.group) : nullptr;
  ReductionTraits traits;
  traits.shares_memory = host && host->shares_memory();
  traits.across_hosts = host && host->sums_by_host();
  // NCCL and sums in shared memory divide while they sum. With other backends the reducer divides.
  const bool nccl = type != at::kCPU && has_backend(*site.group, type) &&
                    is_nccl(site.group->getBackend(type)->getBackendName()) &&
                    nccl_averages_well(site.dtype, site.group->getSize());
  traits.averages = site.plain_average && (nccl || traits.shares_memory);
  return std::make_unique<AllReduce>(site.group, traits);
}

}  // namespace apex::parallel::detail
