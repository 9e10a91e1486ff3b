// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/replica_check.h"

#include <set>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace apex::parallel::detail {
namespace {

std::vector<NamedTensor> state() {
  at::manual_seed(3);
  return {{"a", at::randn({7, 11})},
          {"b", at::randn({130}, at::kDouble)},
          {"empty", at::zeros({0})},
          {"flag", at::ones({3}, at::kBool)},
          {"half", at::randn({33}).to(at::kHalf)},
          {"complex", at::randn({5}, at::kComplexFloat)},
          {"channels last", at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)},
          {"gaps", at::randn({6, 6}).narrow(1, 0, 2)},
          {"expanded", at::randn({1, 4}).expand({3, 4})},
          {"undefined", at::Tensor()},
          {"sparse", at::eye(3).to_sparse()},
          {"meta", at::zeros({4}, at::kMeta)},
          {"last", at::arange(5)}};
}

void flip(const at::Tensor& tensor, int64_t byte, int bit) {
  auto* const memory = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  memory[byte] = static_cast<unsigned char>(memory[byte] ^ (1U << bit));
}

std::vector<int64_t> parts_of(const std::vector<NamedTensor>& tensors, int64_t parts) {
  std::vector<int64_t> digests;
  for (int64_t i = 0; i < parts; ++i) digests.push_back(digest_of_part(tensors, i, parts));
  return digests;
}

// Every bit of every counted tensor is in one part and changes that part's digest.
TEST(ReplicaDigest, EachBit_ChangesTheDigestOfOnePart) {
  const std::vector<NamedTensor> tensors = state();
  for (const int64_t parts : {1, 3, 7, 100, 5000}) {
    const std::vector<int64_t> before = parts_of(tensors, parts);
    EXPECT_EQ(before, parts_of(state(), parts));
    for (const NamedTensor& one : tensors) {
      if (!one.tensor.defined() || one.tensor.is_meta() || one.name == "gaps" ||
          one.tensor.is_sparse()) {
        continue;
      }
      const int64_t bytes = one.name == "expanded" ? 16 : static_cast<int64_t>(one.tensor.nbytes());
      for (int64_t byte = 0; byte < bytes; byte += parts == 1 ? 1 : parts == 5000 ? 371 : 37) {
        flip(one.tensor, byte, static_cast<int>(byte % 8));
        const std::vector<int64_t> after = parts_of(tensors, parts);
        int changed = 0;
        for (int64_t i = 0; i < parts; ++i) changed += after[i] != before[i] ? 1 : 0;
        EXPECT_GE(changed, 1) << one.name << " byte " << byte << " of " << parts;
        if (one.name != "expanded") {
          EXPECT_EQ(changed, 1) << one.name << " " << byte;
        }
        flip(one.tensor, byte, static_cast<int>(byte % 8));
      }
    }
    EXPECT_EQ(before, parts_of(tensors, parts));
  }
}

TEST(ReplicaDigest, WordsThatChangePlaces_ChangeIt) {
  const at::Tensor values = at::arange(64, at::kDouble);
  const int64_t before = digest_of_part({{"a", values}}, 0, 1);
  std::set<int64_t> seen{before};
  for (const int64_t other : {1, 8, 9, 63}) {
    at::Tensor swapped = values.clone();
    swapped[0] = values[other];
    swapped[other] = values[0];
    EXPECT_TRUE(seen.insert(digest_of_part({{"a", swapped}}, 0, 1)).second) << other;
  }
}

// Hazard: sums in which bits cancel out, like sign bits in a sum of words.
TEST(ReplicaDigest, SignsOfManyValues_ChangeIt) {
  at::manual_seed(2);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kInt}) {
    const at::Tensor values = (at::randn({1024}) * 100).to(dtype);
    std::set<int64_t> seen{digest_of_part({{"a", values}}, 0, 1)};
    for (const int64_t step : {1, 2, 8, 16, 32, 512, 1000}) {
      for (const int64_t first : {0, 1, 7}) {
        at::Tensor other = values.clone();
        other.slice(0, first, 1024, step).neg_();
        EXPECT_TRUE(seen.insert(digest_of_part({{"a", other}}, 0, 1)).second)
            << dtype << " every " << step << " from " << first;
      }
    }
  }
}

TEST(Divergence, MostRanks_AreRight_ElseTheFirstOfTheLargestGroup) {
  // Ranks 1 and 3 differ from the others, and from each other.
  const Divergence found =
      find_divergence({1, 2, 3, 1, 9, 3, 1, 2, 3, 1, 2, 8, 1, 2, 3}, /*ranks=*/5, /*tensors=*/3);
  EXPECT_EQ(found.tensors, (std::vector<size_t>{1, 2}));
  EXPECT_EQ(found.apart, (std::vector<int>{1, 3}));
  EXPECT_TRUE(found.majority);
  EXPECT_EQ(found.like, 0);
  EXPECT_TRUE(find_divergence({1, 2, 1, 2}, 2, 2).tensors.empty());
  const Divergence two = find_divergence({1, 2}, 2, 1);
  EXPECT_FALSE(two.majority);
  EXPECT_EQ(two.apart, std::vector<int>{1});
  const Divergence four = find_divergence({1, 2, 2, 3}, 4, 1);
  EXPECT_FALSE(four.majority);
  EXPECT_EQ(four.like, 1);
  EXPECT_EQ(four.apart, (std::vector<int>{0, 3}));
}

}  // namespace
}  // namespace apex::parallel::detail
