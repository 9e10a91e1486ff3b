// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_hierarchy.h"

#include <deque>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "transport/futex_event.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// A larger share is all-reduced in slices of this size at once, so that messages of the two
/// directions of a connection cross.
constexpr int64_t kNetworkSliceBytes = int64_t{4} << 20;

class HierarchyJob final : public HostJob {
 public:
  HierarchyJob(std::shared_ptr<HostChannel> host, c10::intrusive_ptr<c10d::Backend> column,
               std::string what, const at::Tensor& flat, Op op)
      : host_(std::move(host)),
        column_(std::move(column)),
        what_(std::move(what)),
        shares_(flat.tensor_split(host_->size())),
        op_(op),
        in_memory_(host_->summing(what_, flat, op)) {}

  bool advance(std::chrono::microseconds spin) override {
    const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
    if (!summed_) {
      if (!in_memory_->advance(spin)) return false;
      APEX_HOST_STEP("host summed");
      in_memory_.reset();
      summed_ = true;
      send(shares_[static_cast<size_t>(host_->rank())]);
    }
    for (; !sums_.empty(); sums_.pop_front()) {
      if (!sums_.front()->isCompleted()) return false;
      sums_.front()->wait();  // throws its error
    }
    if (!in_memory_) {
      APEX_HOST_STEP("hosts summed");
      const at::Tensor own = shares_[static_cast<size_t>(host_->rank())];
      in_memory_ = host_->gathering(what_, std::move(shares_), own);
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

  // Whatever it waits for: the gather needs all ranks of the host.
  void check_ranks(bool processes) override { host_->check_ranks(processes); }

  std::string awaited() const override {
    return in_memory_ ? in_memory_->awaited() : "another host";
  }

 private:
  void send(const at::Tensor& share) {
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

  const std::shared_ptr<HostChannel> host_;
  const c10::intrusive_ptr<c10d::Backend> column_;
  const std::string what_;
  std::vector<at::Tensor> shares_;  ///< by rank of the host
  const Op op_;
  HostChannel::JobPtr in_memory_;  ///< the first or the last collective; null in between
  bool summed_ = false;            ///< the first is complete
  std::deque<c10::intrusive_ptr<c10d::Work>> sums_;  ///< between the hosts
};

}  // namespace

bool can_sum_over_hosts(const at::Tensor& tensor, Op op) {
  const bool by_gloo = op == Op::SUM || op == Op::PRODUCT || op == Op::MIN || op == Op::MAX;
  return by_gloo && tensor.scalar_type() != at::kShort && HostChannel::can_all_reduce(tensor, op);
}

HostChannel::JobPtr sum_over_hosts(std::shared_ptr<HostChannel> host,
                                   c10::intrusive_ptr<c10d::Backend> column,
                                   const std::string& what, const at::Tensor& tensor, Op op) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  const at::Tensor flat = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view({-1});
  return std::make_shared<HierarchyJob>(std::move(host), std::move(column), what, flat, op);
}

}  // namespace apex::parallel
