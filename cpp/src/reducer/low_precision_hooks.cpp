// SPDX-License-Identifier: BSD-3-Clause
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>

#include "comm/collectives.h"
#include "reducer/built_in_hook.h"

namespace apex::parallel {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using detail::completed;
using detail::SideStream;
using detail::then;

void check_arguments(const GroupPtr& group, at::ScalarType dtype) {
  if (!group) throw InvalidArgument("a communication hook needs a process group");
  if (dtype == at::kHalf || dtype == at::kBFloat16) return;
  std::ostringstream out;
  out << "a low-precision communication hook sends float16 or bfloat16, got " << dtype;
  throw InvalidArgument(out.str());
}

/// The tensor as bytes, because some backends do not support every dtype.
at::Tensor bytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

class CompressHook final : public CommHook {
 public:
  CompressHook(GroupPtr group, at::ScalarType dtype) : group_(std::move(group)), dtype_(dtype) {}

  std::string name() const override {
    return std::string("all-reduce in ") + c10::toString(dtype_);
  }

  bool may_chain() const override { return false; }

  FuturePtr run(GradientBucket& bucket) override {
    const bool narrows =
        static_cast<size_t>(bucket.buffer.element_size()) > c10::elementSize(dtype_);
    at::Tensor message = narrows ? bucket.buffer.to(dtype_) : bucket.buffer;
    message.div_(group_->getSize());
    return issue_all_reduce("compressed all-reduce", *group_, message)->getFuture();
  }

 private:
  const GroupPtr group_;
  const at::ScalarType dtype_;
};

class Fp32AccumulateHook final : public CommHook {
 public:
  Fp32AccumulateHook(GroupPtr group, at::ScalarType dtype)
      : group_(std::move(group)), world_(group_->getSize()), dtype_(dtype) {}

  std::string name() const override {
    return std::string("exchange in ") + c10::toString(dtype_) + ", sum in float32";
  }

  bool may_chain() const override { return false; }

  // On the CPU the second collective is issued at the end of backward. From a callback, its order
  // would differ between ranks. On a device both are enqueued immediately, on a separate stream.
  bool has_finish(const GradientBucket& bucket) const override {
    return world_ > 1 && bucket.buffer.is_cpu();
  }

  FuturePtr run(GradientBucket& bucket) override {
    if (world_ == 1) return completed(bucket.buffer.to(dtype_));  // rounded as with more ranks
    if (!bucket.buffer.is_cpu()) return run_on_device(bucket);
    Exchange exchange = scatter(bucket.buffer);
    FuturePtr future = exchange.work->getFuture();
    exchanges_[bucket.index] = std::move(exchange);
    return then(*future, bucket.buffer);
  }

  FuturePtr finish(GradientBucket& bucket, const at::Tensor&) override {
    const auto found = exchanges_.find(bucket.index);
    if (found == exchanges_.end())
      throw Error("finish() was called for a bucket that was not sent");
    const at::Tensor share = sum(found->second);
    exchanges_.erase(found);
    at::Tensor gathered = at::empty({world_ * share.numel()}, share.options());
    const auto work = gather(gathered, share);
    return then(*work->getFuture(), gathered.narrow(0, 0, bucket.buffer.numel()));
  }

 private:
  struct Exchange {
    at::Tensor sent;      ///< [world, share] in the communication dtype
    at::Tensor received;  ///< [world, share] in that dtype: this rank's share, by sender
    c10::intrusive_ptr<c10d::Work> work;
  };

  Exchange scatter(const at::Tensor& buffer) {
    const int64_t share = (buffer.numel() + world_ - 1) / world_;
    Exchange exchange;
    exchange.sent = at::empty({world_ * share}, buffer.options().dtype(dtype_));
    exchange.sent.narrow(0, 0, buffer.numel()).copy_(buffer);
    exchange.sent.narrow(0, buffer.numel(), world_ * share - buffer.numel()).zero_();
    exchange.received = at::empty_like(exchange.sent);
    exchange.work = issue_all_to_all("all-to-all of low-precision gradients", *group_,
                                     bytes(exchange.received), bytes(exchange.sent));
    return exchange;
  }

  /// This rank's share of the average, [share] in the communication dtype.
  at::Tensor sum(const Exchange& exchange) const {
    at::Tensor total = at::sum(exchange.received.view({world_, -1}), {0}, false, at::kFloat);
    return total.div_(world_).to(dtype_);
  }

  c10::intrusive_ptr<c10d::Work> gather(const at::Tensor& gathered, const at::Tensor& share) {
    return issue_all_gather("all-gather of low-precision averages", *group_, bytes(gathered),
                            bytes(share));
  }

  FuturePtr run_on_device(GradientBucket& bucket) {
    return side_stream_.run(bucket.buffer, [&] {
      const Exchange exchange = scatter(bucket.buffer);
      wait_collective(exchange.work, "all-to-all of low-precision gradients", *group_);
      const at::Tensor share = sum(exchange);
      at::Tensor gathered = at::empty({world_ * share.numel()}, share.options());
      wait_collective(gather(gathered, share), "all-gather of low-precision averages", *group_);
      return completed(gathered.narrow(0, 0, bucket.buffer.numel()));
    });
  }

  const GroupPtr group_;
  const int64_t world_;
  const at::ScalarType dtype_;
  std::unordered_map<int64_t, Exchange> exchanges_;  ///< by bucket, between run() and finish()
  SideStream side_stream_;
};

}  // namespace

std::shared_ptr<CommHook> make_compress_hook(GroupPtr group, at::ScalarType dtype) {
  check_arguments(group, dtype);
  return std::make_shared<CompressHook>(std::move(group), dtype);
}

std::shared_ptr<CommHook> make_fp32_accumulate_hook(GroupPtr group, at::ScalarType dtype) {
  check_arguments(group, dtype);
  return std::make_shared<Fp32AccumulateHook>(std::move(group), dtype);
}

}  // namespace apex::parallel
