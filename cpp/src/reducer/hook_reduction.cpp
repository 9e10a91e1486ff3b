// SPDX-License-Identifier: BSD-3-Clause
#include <exception>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "error_text.h"
#include "reducer/reduction.h"
#include "watch/watcher.h"

namespace apex::parallel::detail {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class HookReduction final : public Reduction {
 public:
  explicit HookReduction(const ReductionSite& site)
      : hook_(site.hook),
        group_(site.group),
        all_groups_(site.all_groups),
        alone_(site.alone),
        index_(site.index),
        is_last_(site.is_last) {}

  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.has_peers = !alone_;
    traits.averages = true;
    traits.runs_user_code = true;
    return traits;
  }

  std::string describe() const override {
    return "communication hook '" + hook_->name() + "', for bucket ";
  }

  void start(const BucketMessage& bucket, const at::Tensor& tensor,
             const std::string& what) override {
    given_ = {};
    given_.index = static_cast<int64_t>(index_);
    given_.is_last = is_last_;
    given_.buffer = tensor.view({-1});
    given_.gradients = bucket.views_of(given_.buffer);
    for (const BucketMessage::Slot& slot : bucket.slots())
      given_.parameters.push_back(slot.variable);
    what_ = what;
    if (!alone_) {
      refuse_failed_group(what, *group_);
      begin_call(*group_, what);
    }
    try {
      future_ = checked(hook_->run(given_));
      if (future_->hasError())
        throw Error("its future holds this error: " + message_of(future_->exception_ptr()));
    } catch (...) {
      end(what);
    }
  }

  bool holds_back_next() const override {
    // True also after a failure, so that every rank fails before the next bucket is launched.
    return future_ && hook_->may_chain() && (!future_->completed() || future_->hasError());
  }

  void wait(const std::string& what, const std::function<void()>&) override {
    if (future_) await(what);
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
      announce("an interruption (Ctrl-C, or another signal)", nullptr);
      throw;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!alone_) {
        announce(what + ": " + shortened(message_of(error)), group_.get());
        throw_communication_error(what, *group_, error, kFixHook);
      }
      throw CommunicationError(who() + what + " failed: " + message_of(error) + " (" + kFixHook +
                               ")");
    }
  }

  void announce(const std::string& why, const c10d::ProcessGroup* except) const {
    if (alone_) return;
    for (const GroupPtr& one : all_groups_) {
      if (one.get() != except) announce_failure(*one, why);
    }
  }

  std::string who() const {
    return "rank " + std::to_string(group_->getRank()) + " of " +
           std::to_string(group_->getSize()) + ": ";
  }

  /// The result of a hook's future: a tensor, or a list of one tensor.
  at::Tensor tensor_of(const c10::IValue& value) const {
    if (value.isTensorList() && value.toTensorVector().size() == 1)
      return value.toTensorVector().front();
    if (value.isTensor()) return value.toTensor();
    throw Error(who() + what_ + " returned a future of " + value.tagKind() +
                "; it must yield a tensor, or a list of one tensor");
  }

  void await(const std::string& what) {
    wait_future(*future_, what, *group_);
    if (!future_->hasError()) return;
    try {
      std::rethrow_exception(future_->exception_ptr());
    } catch (...) {
      end(what);
    }
  }

  const std::shared_ptr<CommHook> hook_;
  const GroupPtr group_;
  const std::vector<GroupPtr> all_groups_;
  const bool alone_;
  const size_t index_;
  const bool is_last_;
  GradientBucket given_;  ///< the bucket that the hook got
  FuturePtr future_;
  std::string what_;
};

}  // namespace

std::unique_ptr<Reduction> make_hook_reduction(const ReductionSite& site) {
  return std::make_unique<HookReduction>(site);
}

}  // namespace apex::parallel::detail
