// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/replica_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include <ATen/Functions.h>

#include "fingerprint.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

constexpr int64_t kParts = 100;

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  return text;
}

constexpr size_t kWords = 8;
constexpr int64_t kBlock = kWords * sizeof(uint64_t);

/// Like FNV-1a, but of words, in eight independent lanes, so that multiplications do not wait for
/// each other. The shift mixes high bits into low bits; without it two flipped sign bits would
/// cancel out.
int64_t digest_of_memory(const void* memory, int64_t bytes) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ULL;  // odd, with well distributed bits
  std::array<uint64_t, kWords> lanes{};
  const auto add = [&](const std::array<uint64_t, kWords>& words) {
    for (size_t lane = 0; lane < kWords; ++lane) {
      const uint64_t mixed = (lanes[lane] ^ words[lane]) * kPrime;
      lanes[lane] = mixed ^ (mixed >> 29U);
    }
  };
  std::array<uint64_t, kWords> words{};
  const auto* from = static_cast<const char*>(memory);
  for (; bytes >= kBlock; bytes -= kBlock, from += kBlock) {
    std::memcpy(words.data(), from, kBlock);
    add(words);
  }
  words = {};
  std::memcpy(words.data(), from, static_cast<size_t>(bytes));
  add(words);
  return Fingerprint().add(lanes.data(), sizeof(lanes)).value();
}

/// The tensor as a flat tensor without gaps.
at::Tensor flat_memory(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  if (!plain.is_non_overlapping_and_dense()) return plain.contiguous().view({-1});
  return plain.as_strided({plain.numel()}, {1}, plain.storage_offset());
}

at::ScalarType word_of(size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

/// The sum of the words and of their squares. Differences that cancel out in the first sum do not
/// cancel out in the second.
at::Tensor digest_on_device(const at::Tensor& flat) {
  const at::Tensor real = flat.is_complex() ? at::view_as_real(flat) : flat;
  const at::Tensor words = real.view(word_of(real.element_size())).to(at::kLong);
  return words.sum() + words.square().sum() * 0x9E3779B1;
}

/// The digest of the bytes [begin, end) of all tensors that are compared, concatenated. Never 0.
int64_t digest_of(const std::vector<NamedTensor>& tensors, int64_t begin, int64_t end) {
  Fingerprint digest;
  std::vector<at::Tensor> on_device;
  int64_t offset = 0;
  for (const NamedTensor& one : tensors) {
    const int64_t bytes = bytes_of_state(one.tensor);
    const auto inside = [&](int64_t at) {
      const int64_t there = std::clamp<int64_t>(at - offset, 0, bytes);
      return there == bytes ? bytes : there / kBlock * kBlock;
    };
    const int64_t from = inside(begin), to = inside(end);
    offset += bytes;
    if (from >= to) continue;
    const at::Tensor flat = flat_memory(one.tensor);
    if (flat.is_cpu()) {
      const int64_t part =
          digest_of_memory(static_cast<const char*>(flat.const_data_ptr()) + from, to - from);
      digest.add(&part, sizeof(part));
    } else {
      const auto size = static_cast<int64_t>(flat.element_size());
      on_device.push_back(digest_on_device(flat.narrow(0, from / size, (to - from) / size)));
    }
  }
  if (!on_device.empty()) {
    for (at::Tensor& one : on_device) one = one.to(on_device.front().device());
    const at::Tensor sums = at::stack(on_device).cpu();
    digest.add(sums.const_data_ptr(), sums.nbytes());
  }
  digest.add(&offset, sizeof(offset));
  const int64_t value = digest.value();
  return value == 0 ? 1 : value;
}

}  // namespace

int64_t bytes_of_state(const at::Tensor& tensor) {
  const bool counts = tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
                      has_memory(tensor);
  return counts ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

int64_t digest_of_part(const std::vector<NamedTensor>& tensors, int64_t index, int64_t parts) {
  int64_t total = 0;
  for (const NamedTensor& one : tensors) total += bytes_of_state(one.tensor);
  // Avoids total * index, which may overflow.
  const auto cut = [&](int64_t i) { return total / parts * i + total % parts * i / parts; };
  return digest_of(tensors, cut(index), cut(index + 1));
}

std::vector<int64_t> digests_of(const std::vector<NamedTensor>& tensors) {
  std::vector<int64_t> digests;
  for (const NamedTensor& one : tensors)
    digests.push_back(digest_of({one}, 0, bytes_of_state(one.tensor)));
  return digests;
}

Divergence find_divergence(const std::vector<int64_t>& digests, size_t ranks, size_t tensors) {
  std::map<std::vector<int64_t>, std::vector<int>> groups;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto own = digests.begin() + static_cast<int64_t>(rank * tensors);
    groups[{own, own + static_cast<int64_t>(tensors)}].push_back(static_cast<int>(rank));
  }
  Divergence found;
  const std::vector<int>* most = nullptr;
  for (const auto& [own, members] : groups) {
    if (most == nullptr || members.size() > most->size() ||
        (members.size() == most->size() && members.front() < most->front()))
      most = &members;
  }
  if (most == nullptr) return found;
  found.like = most->front();
  found.majority = 2 * most->size() > ranks;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (std::find(most->begin(), most->end(), static_cast<int>(rank)) == most->end())
      found.apart.push_back(static_cast<int>(rank));
  }
  for (size_t i = 0; i < tensors; ++i) {
    bool same = true;
    for (size_t rank = 1; rank < ranks; ++rank)
      same = same && digests[rank * tensors + i] == digests[i];
    if (!same) found.tensors.push_back(i);
  }
  return found;
}

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
  const at::Tensor digests =
      context_.members
          .all_gather("comparison of replicas", at::tensor(digests_of(state_), at::kLong))
          .wait();
  const auto* const begin = digests.const_data_ptr<int64_t>();
  const Divergence found = find_divergence(
      {begin, begin + digests.numel()}, static_cast<size_t>(context_.members.size), state_.size());
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
        ", probably because of other weights loaded on some ranks, another learning rate or "
        "gradient clipping, a step with gradients that were not averaged, or a memory error";
  }
  return text + note_on_ranks(*context_.members.control()) +
         ": load a checkpoint on every rank, or use replica_check_every=0 if they differ on "
         "purpose";
}

}  // namespace apex::parallel::detail
