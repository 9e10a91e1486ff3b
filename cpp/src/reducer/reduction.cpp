// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/reduction.h"

#include <algorithm>
#include <exception>
#include <typeinfo>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/scale_in_place.h"
#include "comm/separate_group.h"
#include "error_text.h"
#include "tensor_memory.h"
#include "torch_version.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

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
    // By the group's own function: works of this library's channels have no future.
    std::vector<at::Tensor> messages{message};
    return call_collective("compressed all-reduce", *group_,
                           [&] { return group_->allreduce(messages); })
        ->getFuture();
  }

 private:
  const GroupPtr group_;
  const at::ScalarType dtype_;
};

}  // namespace

CommHook::~CommHook() = default;

std::string CommHook::name() const { return c10::demangle(typeid(*this).name()); }

std::shared_ptr<CommHook> make_compress_hook(GroupPtr group, at::ScalarType dtype) {
  if (!group) throw InvalidArgument("a communication hook needs a process group");
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    throw InvalidArgument("a low-precision communication hook sends float16 or bfloat16, got " +
                          std::string(c10::toString(dtype)));
  }
  return std::make_shared<CompressHook>(std::move(group), dtype);
}

namespace detail {

namespace {

/// For one rank, where the tensor already is the sum. A call to a backend would cost more than the
/// rest of a step.
class LocalReduction final : public Reduction {
 public:
  ReductionTraits traits() const override { return {/*has_peers=*/false}; }
  std::string describe() const override { return "reduction of bucket "; }
  void start(const BucketMessage&, const at::Tensor&, const std::string&) override { done_ = true; }
  void wait(const std::string&, const std::function<void()>&) override { done_ = false; }
  bool done() const override { return done_; }
  void drop() noexcept override { done_ = false; }

 private:
  bool done_ = false;
};

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

class HookReduction final : public Reduction {
 public:
  explicit HookReduction(ReductionSite site) : site_(std::move(site)) {}

  ReductionTraits traits() const override {
    return {/*has_peers=*/!site_.alone, /*averages=*/true, /*runs_user_code=*/true};
  }

  std::string describe() const override {
    return "communication hook '" + site_.hook->name() + "', for bucket ";
  }

  void start(const BucketMessage& bucket, const at::Tensor& tensor,
             const std::string& what) override {
    given_ = {};
    given_.index = static_cast<int64_t>(site_.index);
    given_.is_last = site_.is_last;
    given_.buffer = tensor.view({-1});
    given_.gradients = bucket.views_of(given_.buffer);
    for (const BucketMessage::Slot& slot : bucket.slots())
      given_.parameters.push_back(slot.variable);
    what_ = what;
    if (!site_.alone) {
      refuse_failed_group(what, *site_.group);
      begin_call(*site_.group, what);
    }
    try {
      future_ = checked(site_.hook->run(given_));
      if (future_->hasError())
        throw Error("its future holds this error: " + message_of(future_->exception_ptr()));
    } catch (...) {
      end(what);
    }
  }

  bool holds_back_next() const override {
    // True also after a failure, so that every rank fails before the next bucket is launched.
    return future_ && site_.hook->may_chain() && (!future_->completed() || future_->hasError());
  }

  void wait(const std::string& what, const std::function<void()>&) override {
    if (!future_) return;
    wait_future(*future_, what, *site_.group);
    if (!future_->hasError()) return;
    try {
      std::rethrow_exception(future_->exception_ptr());
    } catch (...) {
      end(what);
    }
  }

  void deliver(BucketMessage& bucket) override {
    const c10::IValue value = future_->value();
    try {
      bucket.assign(tensor_of(value));
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(who() + what_ + ": " + error.what());
    }
    drop();
  }

  bool done() const override { return future_ && future_->completed(); }

  void drop() noexcept override {
    future_.reset();
    given_ = {};
  }

 private:
  static FuturePtr checked(FuturePtr future) {
    if (!future) {
      throw Error(
          "it returned no future, so the gradients of this bucket would not be averaged: return a "
          "future that yields the result");
    }
    return future;
  }

  /// In a catch block: notifies the ranks that wait in any group of the reducer, and throws.
  [[noreturn]] void end(const std::string& what) {
    future_.reset();
    try {
      throw;
    } catch (const CommunicationError&) {
      throw;  // the other ranks are already notified
    } catch (const Interrupted&) {
      throw;
    } catch (const HookInterrupted&) {
      announce("an interruption (Ctrl-C, or another signal)", "", nullptr);
      throw;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!site_.alone) {
        announce(what, own_cause(error), site_.group.get());
        throw_communication_error(what, *site_.group, error, kFixHook);
      }
      throw CommunicationError(who() + what + " failed: " + message_of(error) + " (" + kFixHook +
                               ")");
    }
  }

  void announce(const std::string& failed, const std::string& cause,
                const c10d::ProcessGroup* except) const {
    if (site_.alone) return;
    for (const GroupPtr& one : site_.all_groups) {
      if (one.get() != except) announce_failure(*one, failed, cause);
    }
  }

  std::string who() const { return rank_of(site_.group->getRank(), site_.group->getSize()) + ": "; }

  /// The result of a hook's future: a tensor, or a list of one tensor.
  at::Tensor tensor_of(const c10::IValue& value) const {
    if (value.isTensorList() && value.toTensorVector().size() == 1)
      return value.toTensorVector().front();
    if (value.isTensor()) return value.toTensor();
    throw Error(who() + what_ + " returned a future of " + value.tagKind() +
                "; it must yield a tensor, or a list of one tensor");
  }

  const ReductionSite site_;
  GradientBucket given_;  ///< the bucket that the hook got
  FuturePtr future_;
  std::string what_;
};

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

/// The gradient of a parameter as a tensor with `sparse_dim` sparse dimensions. It has no entries
/// if the parameter has no gradient.
at::Tensor sparse_gradient(const at::Tensor& variable, int64_t sparse_dim) {
  const at::Tensor& grad = variable.grad();
  if (!grad.defined()) {
    return at::_sparse_coo_tensor_with_dims(sparse_dim, variable.dim() - sparse_dim,
                                            variable.sizes(),
                                            variable.options().layout(at::kSparse));
  }
  const at::Tensor values = grad.detach();
  // All ranks exchange entries in the recorded form.
  if (values.layout() != at::kSparse || values.sparse_dim() != sparse_dim)
    return in_memory(values).to_sparse(sparse_dim);
  return values;
}

/// The coalesced sum over ranks of coalesced sparse COO tensors of one shape. Uses one all-gather
/// of the numbers of entries, and others of the entries, padded to the largest number. Works on
/// every backend that gathers dense tensors. Blocks the host until the numbers of entries are
/// known.
at::Tensor sparse_all_reduce(const at::Tensor& mine, const GroupPtr& group) {
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

}  // namespace

std::unique_ptr<Reduction> choose_reduction(const ReductionSite& site) {
  if (site.hook) return std::make_unique<HookReduction>(site);
  if (site.alone) return std::make_unique<LocalReduction>();
  return make_all_reduce(site);
}

at::Tensor average_sparse(const at::Tensor& variable, int64_t sparse_dim, const Averaging& factors,
                          const GroupPtr& group) {
  at::Tensor sum = sparse_gradient(variable, sparse_dim).mul(factors.before).coalesce();
  if (group) sum = sparse_all_reduce(sum, group);
  if (factors.after == 0) return sum.zero_();
  if (factors.after != 1.0) scale_in_place(sum, factors.after);
  return sum;
}

}  // namespace detail

}  // namespace apex::parallel
