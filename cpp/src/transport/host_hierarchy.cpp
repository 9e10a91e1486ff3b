// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_hierarchy.h"

#include <deque>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "endings.h"
#include "transport/host_step.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// A larger share is all-reduced in slices of this size at once, so that messages of the two
/// directions of a connection cross.
constexpr int64_t kNetworkSliceBytes = int64_t{4} << 20;

/// See Note [Sums over several hosts].
class HierarchyJob final : public HostJob {
 public:
  HierarchyJob(std::shared_ptr<const HostLayout> layout, std::shared_ptr<HostChannel> host,
               c10::intrusive_ptr<c10d::Backend> column, std::string what, at::Tensor flat, Op op)
      : layout_(std::move(layout)),
        host_(std::move(host)),
        column_(std::move(column)),
        what_(std::move(what)),
        flat_(std::move(flat)),
        op_(op),
        in_memory_(host_->summing(what_, flat_, op_)) {}

  bool advance(std::chrono::microseconds spin) override {
    const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
    if (!summed_) {
      if (!in_memory_->advance(spin)) return false;
      APEX_HOST_STEP("host summed");
      in_memory_.reset();
      summed_ = true;
      send();
    }
    for (; !sums_.empty(); sums_.pop_front()) {
      if (!sums_.front()->isCompleted()) return false;
      sums_.front()->wait();  // throws its error
    }
    if (!in_memory_) {
      APEX_HOST_STEP("hosts summed");
      std::vector<at::Tensor> shares;
      for (int place = 0; place < layout_->places(); ++place) shares.push_back(share_of(place));
      in_memory_ = host_->gathering(what_, std::move(shares));
    }
    return in_memory_->advance(spin);
  }

  std::function<void(milliseconds)> sleeper() override {
    if (in_memory_) return in_memory_->sleeper();
    return [sum = sums_.front()](milliseconds longest) {
      try {
        sum->wait(longest);
      } catch (const std::exception&) {
        // The time is over, or advance() reports the error.
      }
    };
  }

  void check_ranks(bool processes) override {
    if (in_memory_) in_memory_->check_ranks(processes);
  }

  std::string awaited() const override {
    return in_memory_ ? in_memory_->awaited() : "another host";
  }

 private:
  at::Tensor share_of(int place) const {
    const auto [begin, end] = equal_part(flat_.numel(), layout_->places(), place);
    return flat_.narrow(0, begin, end - begin);
  }

  void send() {
    const at::Tensor share = share_of(layout_->place);
    if (share.numel() == 0) return;
    c10d::AllreduceOptions options;
    options.reduceOp = op_;
    for (const at::Tensor& slice :
         share.split(kNetworkSliceBytes / static_cast<int64_t>(share.element_size()))) {
      std::vector<at::Tensor> message{slice};
      sums_.push_back(column_->allreduce(message, options));
    }
    APEX_HOST_STEP("sent");
  }

  const std::shared_ptr<const HostLayout> layout_;
  const std::shared_ptr<HostChannel> host_;
  const c10::intrusive_ptr<c10d::Backend> column_;
  const std::string what_;
  const at::Tensor flat_;
  const Op op_;
  HostChannel::JobPtr in_memory_;  ///< the first or the last collective; null in between
  bool summed_ = false;            ///< the first is complete
  std::deque<c10::intrusive_ptr<c10d::Work>> sums_;  ///< between the hosts
};

}  // namespace

HostHierarchy::HostHierarchy(HostLayout layout, std::shared_ptr<HostChannel> host,
                             c10::intrusive_ptr<c10d::Backend> column)
    : layout_(std::make_shared<const HostLayout>(std::move(layout))),
      host_(std::move(host)),
      column_(std::move(column)) {}

HostHierarchy::~HostHierarchy() {
  if (!host_->is_own()) {
    column_.release();  // forked: the threads that Gloo would join do not exist
    return;
  }
  const bool failed = host_->has_failed();
  end_elsewhere(
      [host = std::move(host_), column = std::move(column_)]() mutable {
        host->drain();
        column.reset();
      },
      failed);
}

bool HostHierarchy::can_all_reduce(const at::Tensor& tensor, Op op) {
  if (op == Op::AVG || !HostChannel::can_all_reduce(tensor, op)) return false;
  switch (tensor.scalar_type()) {
    case at::kShort:
    case at::kBool:
      return false;
    default:
      return op == Op::SUM || op == Op::PRODUCT || op == Op::MIN || op == Op::MAX;
  }
}

HostChannel::WorkPtr HostHierarchy::all_reduce(HostCall call, const at::Tensor& tensor, Op op) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  const at::Tensor flat = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view({-1});
  auto job = std::make_shared<HierarchyJob>(layout_, host_, column_, call.what, flat, op);
  return host_->issue(std::move(call), std::move(job));
}

}  // namespace apex::parallel
