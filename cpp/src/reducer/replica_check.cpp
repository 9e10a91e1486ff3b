// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/replica_check.h"

#include <utility>

#include <ATen/Functions.h>

#include "comm/collectives.h"
#include "step/replica_digest.h"

namespace apex::parallel::detail {

namespace {

constexpr int64_t kParts = 100;

std::vector<int64_t> gather(ReducerContext& context, const std::vector<int64_t>& mine) {
  const ControlMessage message =
      context.members.all_gather("comparison of replicas", at::tensor(mine, at::kLong));
  const at::Tensor all = message.wait();
  const auto* const begin = all.const_data_ptr<int64_t>();
  return {begin, begin + all.numel()};
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += "rank " + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

int64_t ReplicaCheck::parts() const {
  return context_.options.replica_check_every.value_or(kParts);
}

bool ReplicaCheck::compares() const {
  const ReducerOptions& options = context_.options;
  if (context_.members.alone() || context_.join.active || parts() == 0) return false;
  const bool by_default =
      options.ranks_begin_alike() && !context_.hook && options.check_steps.value_or(true);
  return options.replica_check_every || (by_default && context_.reads_reports());
}

int64_t ReplicaCheck::digest(const StepFacts& facts, const std::vector<bool>& trainable) {
  all_compared_ = false;
  // A local update may be intended: some optimizers move parameters to evaluate a gradient
  // elsewhere, and move them back.
  if (!compares() ||
      ((facts.local || facts.stepped_locally) && !context_.options.replica_check_every))
    return 0;
  if (trainable_ != trainable) {
    trainable_ = trainable;
    state_.clear();
    for (size_t i = 0; i < trainable.size(); ++i) {
      if (trainable[i]) state_.push_back(context_.parameters.named()[i]);
    }
  }
  all_compared_ = all_next_;
  if (all_compared_) return digest_of_part(state_, 0, 1);
  return digest_of_part(state_, context_.backward_number % parts(), parts());
}

std::string ReplicaCheck::compare(const StepTable& table) {
  if (!table.has_digests()) return {};
  if (std::exchange(all_compared_, false)) all_next_ = false;
  if (++since_reported_ > 2 * parts()) reported_ = 0;  // it was fixed
  return table.same_digests() ? std::string() : locate();
}

/// Finds the ranks and parameters that differ. Collective, unless only each second, fourth, ...
/// difference is reported.
std::string ReplicaCheck::locate() {
  since_reported_ = 0;
  ++reported_;
  const bool warns = context_.options.on_divergence == OnDivergence::kWarn;
  if (warns && (reported_ & (reported_ - 1)) != 0) return {};
  const std::vector<int64_t> digests = gather(context_, digests_of(state_));
  const Divergence found =
      find_divergence(digests, static_cast<size_t>(context_.members.size), state_.size());
  if (found.tensors.empty()) {  // some ranks have compared a part, and some all
    --reported_;
    return {};
  }
  std::string text = found.majority
                         ? list(found.apart) + (found.apart.size() > 1 ? " hold" : " holds") +
                               " a different state than the other ranks: "
                         : "the ranks do not hold the same state (" + list(found.apart) +
                               (found.apart.size() > 1 ? " differ" : " differs") + " from rank " +
                               std::to_string(found.like) + ", and no state has a majority): ";
  const size_t at = found.tensors.front();
  text += "parameter '" + state_[at].name + "' differs";
  if (found.tensors.size() > 1) {
    text += ", and so do " + std::to_string(found.tensors.size() - 1) + " more of " +
            std::to_string(state_.size()) + " tensors";
  }
  text += " (found in backward number " + std::to_string(context_.backward_number) + ")";
  if (!warns || reported_ == 1) {  // not again in each warning
    text +=
        ", probably because of other weights loaded on some ranks, a step with gradients that were "
        "not averaged, or a memory error";
  }
  return text + note_on_ranks(*context_.members.control());
}

}  // namespace apex::parallel::detail
