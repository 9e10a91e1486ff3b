// SPDX-License-Identifier: BSD-3-Clause
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "reducer/averaging.h"
#include "reducer/reduction.h"
#include "torch_version.h"

namespace apex::parallel::detail {

namespace {

// Note [Backends that keep references to reduced tensors]
//
// torch 2.15's NCCL backend references the tensors of a collective until its watchdog, or the next
// collective, finds it completed. That can be up to a second after wait(). If these tensors were
// the gradients themselves, a gradient that is kept for the next backward would seem to have
// another reader (Note [Who may read a gradient's memory]) and would be copied. So the backend gets
// a tensor with its own storage on the same memory. That storage owns the memory only until wait().
// Before wait(), even if the reduction is dropped, the memory lives as long as the backend
// references it.

/// A tensor on the memory of another tensor, which it co-owns until end().
class Loan {
 public:
  Loan() = default;
  explicit Loan(const at::Tensor& tensor)
      : owner_(std::make_shared<c10::Storage>(tensor.storage())) {
    auto* const context = new std::shared_ptr<c10::Storage>(owner_);
    c10::DataPtr memory(owner_->mutable_data(), context, &end_of_backend, tensor.device());
    c10::Storage storage(c10::Storage::use_byte_size_t(), owner_->nbytes(), std::move(memory),
                         /*allocator=*/nullptr, /*resizable=*/false);
    tensor_ = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), tensor.key_set(),
                                                       tensor.dtype());
    tensor_.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                         tensor.storage_offset());
  }

  const at::Tensor& tensor() const { return tensor_; }

  /// Ends the co-ownership. The backend no longer uses the memory of tensor().
  void end() {
    if (owner_) *owner_ = c10::Storage();
    forget();
  }
  /// Drops this object's references. The memory lives as long as others hold tensor().
  void forget() {
    owner_.reset();
    tensor_ = at::Tensor();
  }

 private:
  static void end_of_backend(void* context) {
    delete static_cast<std::shared_ptr<c10::Storage>*>(context);
  }

  std::shared_ptr<c10::Storage> owner_;
  at::Tensor tensor_;
};

class AllReduce final : public Reduction {
 public:
  AllReduce(GroupPtr group, ReductionTraits traits) : group_(std::move(group)), traits_(traits) {}

  ReductionTraits traits() const override { return traits_; }

  std::string describe() const override { return "all-reduce of bucket "; }

  void start(const BucketMessage& bucket, const at::Tensor& tensor,
             const std::string& what) override {
    if (tensor.numel() == 0) return;  // empty on every rank; some backends reject it
    const auto op = traits_.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    const bool is_gradient = bucket.kind() == BucketMessage::Kind::kInPlace;
    if (is_gradient && !tensor.is_cpu()) loan_ = Loan(tensor);
    const at::Tensor& given = loan_.tensor().defined() ? loan_.tensor() : tensor;
    work_ = issue_all_reduce(what, *group_, given, op);
  }

  void wait(const std::string& what, const std::function<void()>& meanwhile) override {
    if (!work_) return;
    wait_collective(work_, what, *group_, meanwhile);
    work_.reset();
    loan_.end();
  }

  bool done() const override { return work_ && work_->isCompleted() && !work_->exception(); }

  void drop() noexcept override {
    work_.reset();
    loan_.forget();
  }

 private:
  const GroupPtr group_;
  const ReductionTraits traits_;
  c10::intrusive_ptr<c10d::Work> work_;
  Loan loan_;  ///< of a gradient that is reduced in place, on a device
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
