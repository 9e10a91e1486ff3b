// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/replica_check.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

#include "comm/collectives.h"
#include "fingerprint.h"

namespace apex::parallel::detail {

namespace {

constexpr int64_t kParts = 100;

std::vector<int64_t> gather(ReducerContext& context, const std::vector<int64_t>& mine) {
  const ControlMessage message =
      context.members.all_gather("comparison of replicas", at::tensor(mine, at::kLong));
  const at::Tensor all = context.monitor.open([&] { return message.wait(); });
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
  if (context_.members.alone() || context_.joining || context_.defers || parts() == 0) return false;
  const bool by_default =
      options.ranks_begin_alike() && !context_.hook && options.check_steps.value_or(true);
  return options.replica_check_every || (by_default && context_.reads_reports());
}

/// @param at_others  list the other tensors again, not only the first time.
void ReplicaCheck::look(bool at_others) {
  if (!at_others && !state_.empty()) return;
  state_.clear();
  // A rank may write frozen parameters alone, for example a memory bank or a moving average.
  for (const NamedTensor& one : context_.parameters.named()) {
    if (one.tensor.requires_grad()) state_.push_back(one);
  }
  parameters_ = state_.size();
  may_differ_.assign(parameters_, false);
  if (!others) return;
  const std::vector<Replica> more = context_.monitor.open([&] { return others(); });
  for (const Replica& one : more) {
    if (one.may_differ && (!with_buffers_ || differing_.count(one.tensor.name) != 0)) continue;
    state_.push_back(one.tensor);
    may_differ_.push_back(one.may_differ);
  }
}

int64_t ReplicaCheck::digest(const StepFacts& facts) {
  all_compared_ = false;
  if (!compares()) return 0;
  // This difference may be intended: some optimizers move parameters to evaluate a gradient
  // elsewhere, and move them back.
  if (facts.updated_locally && !context_.options.replica_check_every) return 0;
  all_compared_ = all_next_;
  const int64_t part = all_next_ ? 0 : context_.backward_number % parts();
  // The other tensors may have changed since. They come last, so they are in the last parts, unless
  // there is only one part. A list with another length is detected in the next round.
  int64_t before = 0, total = 0;
  for (size_t i = 0; i < state_.size(); ++i) {
    const int64_t bytes = bytes_of_state(state_[i].tensor);
    total += bytes;
    if (i < parameters_) before += bytes;
  }
  const bool reaches = static_cast<double>(total) * static_cast<double>(part + 1) >
                       static_cast<double>(before) * static_cast<double>(parts());
  look(/*at_others=*/part == 0 || reaches);
  ++compared_;
  if (++since_reported_ > 2 * parts()) reported_ = 0;  // it was fixed
  return digest_of_part(state_, part, all_next_ ? 1 : parts());
}

void ReplicaCheck::received(const StepTable& table) {
  if (!std::exchange(all_compared_, false)) return;
  all_next_ = false;
  for (int rank = 0; rank < context_.members.size; ++rank)
    all_next_ |= table.of(static_cast<size_t>(rank)).digest == 0;  // that rank compared nothing
}

/// Whether all ranks have tensors of the same names and sizes. Collective.
bool ReplicaCheck::same_lists() {
  Fingerprint list;
  for (const NamedTensor& one : state_) {
    const int64_t bytes = bytes_of_state(one.tensor);
    list.add(one.name.data(), one.name.size() + 1).add(&bytes, sizeof(bytes));
  }
  const std::vector<int64_t> all =
      gather(context_, {static_cast<int64_t>(state_.size()), list.value()});
  for (size_t i = 2; i < all.size(); ++i) {
    if (all[i] != all[i - 2]) return false;
  }
  return true;
}

std::string ReplicaCheck::locate() {
  const bool raises = context_.options.on_divergence != OnDivergence::kWarn;
  ++reported_;
  since_reported_ = 0;
  if (!raises && (reported_ & (reported_ - 1)) != 0) return {};
  look(/*at_others=*/true);
  // The lists of tensors may differ between ranks. Then tensors that may differ are excluded from
  // now on. If the lists still differ, only parameters are compared.
  for (int i = 0; i < 2 && !same_lists(); ++i) {
    if (with_buffers_) {
      with_buffers_ = false;
    } else {
      others = {};
    }
    look(/*at_others=*/true);
  }
  const std::vector<int64_t> digests = gather(context_, digests_of(state_));
  const auto ranks = static_cast<size_t>(context_.members.size);
  std::vector<bool> counts(state_.size(), true);
  if (compared_ <= parts()) {
    const Divergence first = find_divergence(digests, ranks, counts);
    for (const size_t i : first.tensors) {
      if (!may_differ_[i]) continue;
      counts[i] = false;
      differing_.insert(state_[i].name);
    }
  }
  const Divergence found = find_divergence(digests, ranks, counts);
  if (found.tensors.empty()) {
    --reported_;
    look(/*at_others=*/true);
    return {};
  }
  like_ = found.like;
  apart_.clear();
  for (const size_t i : found.tensors) apart_.push_back(state_[i].tensor);
  std::string text = found.majority
                         ? list(found.apart) + (found.apart.size() > 1 ? " hold" : " holds") +
                               " a different state than the other ranks: "
                         : "the ranks do not hold the same state (" + list(found.apart) +
                               (found.apart.size() > 1 ? " differ" : " differs") + " from rank " +
                               std::to_string(found.like) + ", and no state has a majority): ";
  const size_t at = found.tensors.front();
  text += (at < parameters_ ? "parameter '" + state_[at].name + "'" : state_[at].name) + " differs";
  if (found.tensors.size() > 1) {
    text += ", and so do " + std::to_string(found.tensors.size() - 1) + " more of " +
            std::to_string(state_.size()) + " tensors";
  }
  return text + " (found in backward number " + std::to_string(context_.backward_number) +
         "). Probable causes are other weights loaded on some ranks, an optimizer step with "
         "gradients that were not averaged, or a memory error" +
         note_on_ranks(*context_.members.control());
}

std::string ReplicaCheck::resync() {
  const std::vector<at::Tensor> tensors = std::exchange(apart_, {});
  context_.monitor.open([&] {
    broadcast_coalesced(tensors, context_.members.control(), like_, kBroadcastBytes,
                        "broadcast of the state of most ranks");
  });
  context_.parameters.forget_versions();
  if (taken_over) context_.monitor.open(taken_over);
  return "rank " + std::to_string(like_) + "'s state was copied to all ranks";
}

}  // namespace apex::parallel::detail
