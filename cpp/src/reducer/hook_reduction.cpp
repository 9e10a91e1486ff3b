// SPDX-License-Identifier: BSD-3-Clause
#include <string>
#include <utility>

#include <apex/error.h>

#include "comm/collectives.h"
#include "reducer/reduction.h"

namespace apex::parallel::detail {

namespace {

class HookReduction final : public Reduction {
 public:
  explicit HookReduction(const ReductionSite& site)
      : hook_(site.hook),
        group_(site.group),
        alone_(site.alone),
        index_(site.index),
        is_last_(site.last_of_hook) {}

  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.has_peers = !alone_;
    traits.carries_trailer = false;
    traits.averages = true;
    traits.has_later_messages = true;
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
    given_.buffer = bucket.gradients_of(tensor);
    given_.gradients = bucket.views_of(given_.buffer);
    for (const BucketMessage::Slot& slot : bucket.slots())
      given_.parameters.push_back(slot.variable);
    finishing_ = false;
    what_ = what;
    future_ = checked(hook_->run(given_), what);
  }

  bool holds_back_next() const override {
    return future_ && hook_->may_chain() && !future_->completed();
  }

  bool has_next_phase() const override {
    return future_ && !finishing_ && hook_->has_finish(given_);
  }

  void next_phase(const std::string& what) override {
    await(what);
    finishing_ = true;
    try {
      future_ = checked(hook_->finish(given_, tensor_of(future_->value())), what);
    } catch (const CommunicationError&) {
      throw;
    } catch (...) {
      // The other ranks may be waiting in this phase already: they hear of it.
      throw_communication_error(what, *group_, std::current_exception(), "a later phase of it");
    }
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
  FuturePtr future() const override { return future_; }

  void drop() noexcept override {
    future_.reset();
    given_ = {};
  }

 private:
  FuturePtr checked(FuturePtr future, const std::string& what) const {
    if (!future) {
      throw Error(
          who() + what +
          ": the hook returned no future, so the gradients of this bucket would not be averaged: "
          "return one that yields the result");
    }
    return future;
  }

  std::string who() const {
    return "rank " + std::to_string(group_->getRank()) + " of " +
           std::to_string(group_->getSize()) + ": ";
  }

  /// What a hook's future yields: a tensor, or a list of one.
  at::Tensor tensor_of(const c10::IValue& value) const {
    if (value.isTensorList() && value.toTensorVector().size() == 1)
      return value.toTensorVector().front();
    if (value.isTensor()) return value.toTensor();
    throw Error(who() + what_ + " has a future of " + value.tagKind() +
                "; it has to yield a tensor, or a list of one");
  }

  void await(const std::string& what) { wait_future(*future_, what, *group_); }

  const std::shared_ptr<CommHook> hook_;
  const GroupPtr group_;
  const bool alone_;
  const size_t index_;
  const bool is_last_;
  GradientBucket given_;  ///< to the hook
  bool finishing_ = false;
  FuturePtr future_;
  std::string what_;
};

}  // namespace

std::unique_ptr<Reduction> make_hook_reduction(const ReductionSite& site) {
  return std::make_unique<HookReduction>(site);
}

}  // namespace apex::parallel::detail
