// SPDX-License-Identifier: BSD-3-Clause
#include "step/replica_digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include <ATen/Functions.h>

#include "fingerprint.h"
#include "tensor_memory.h"

namespace apex::parallel {

namespace {

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

}  // namespace apex::parallel
