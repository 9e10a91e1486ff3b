// SPDX-License-Identifier: BSD-3-Clause
// Ranks are threads. Oracle: the dense float64 sum of the ranks' inputs.

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <support/test_seed.h>
#include <support/thread_backend.h>

#include <apex/error.h>

#include "reducer/reduction.h"

namespace apex::parallel::detail {
namespace {

using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;

constexpr int kRanks = 3;
constexpr const char* kWhat = "all-reduce of bucket 0";

/// The entries of one rank: their positions, not sorted, some possibly duplicated.
struct Entries {
  std::vector<std::vector<int64_t>> indices;  ///< per sparse dimension
  int64_t count() const { return static_cast<int64_t>(indices.front().size()); }
};

struct Case {
  const char* name;
  std::vector<int64_t> sizes;
  std::vector<Entries> of_rank;
  int64_t distinct;  ///< distinct positions over all ranks

  int64_t sparse_dim() const { return static_cast<int64_t>(of_rank[0].indices.size()); }
};

std::vector<Case> cases() {
  return {
      {"as many on each rank", {6, 3}, {{{{0, 2}}}, {{{1, 2}}}, {{{2, 5}}}}, 4},
      {"other numbers", {6, 3}, {{{{4}}}, {{{0, 1, 2, 3, 4}}}, {{{5, 4}}}}, 6},
      {"none on the first", {6, 3}, {{{{}}}, {{{5, 1}}}, {{{1}}}}, 2},
      {"none on the last", {6, 3}, {{{{5, 1}}}, {{{0}}}, {{{}}}}, 3},
      {"on one only", {6, 3}, {{{{}}}, {{{3}}}, {{{}}}}, 1},
      {"none", {6, 3}, {{{{}}}, {{{}}}, {{{}}}}, 0},
      {"twice on a rank", {6, 3}, {{{{2, 2, 0, 2}}}, {{{5, 5}}}, {{{2}}}}, 3},
      {"rows of matrices", {5, 2, 3}, {{{{0, 4}}}, {{{4}}}, {{{1, 4, 1}}}}, 3},
      {"two sparse dimensions", {4, 5, 2}, {{{{0, 3}, {4, 1}}}, {{{3}, {1}}}, {{{}, {}}}}, 2},
      {"scalars", {4, 5}, {{{{0, 3}, {4, 1}}}, {{{3}, {2}}}, {{{0, 0}, {4, 4}}}}, 3},
  };
}

at::Tensor gradient_of(const Case& one, int rank, at::ScalarType dtype) {
  const Entries& entries = one.of_rank[rank];
  std::vector<at::Tensor> rows;
  for (const auto& row : entries.indices) rows.push_back(at::tensor(row, at::kLong));
  std::vector<int64_t> shape{entries.count()};
  shape.insert(shape.end(), one.sizes.begin() + one.sparse_dim(), one.sizes.end());
  const at::Tensor values =
      at::randn(shape, at::isComplexType(dtype) ? at::kComplexDouble : at::kDouble).to(dtype);
  return at::sparse_coo_tensor(at::stack(rows), values, one.sizes, at::TensorOptions(dtype));
}

/// A gradient that passes through its bucket on one rank.
struct Bucket {
  at::Tensor parameter;
  BucketMessage message;
  std::unique_ptr<Reduction> reduction;

  Bucket(const at::Tensor& gradient, const GroupPtr& group)
      : parameter(at::zeros(gradient.sizes(), gradient.scalar_type()).requires_grad_()),
        message(BucketMessage::Kind::kSparse, {0}, {parameter}, at::kCPU, options_for(gradient)) {
    parameter.mutable_grad() = gradient;
    ReductionSite site;
    site.kind = BucketMessage::Kind::kSparse;
    site.group = group;
    reduction = make_sparse_reduction(site);
    message.pack({1}, 1.0);
  }
  static MessageOptions options_for(const at::Tensor& gradient) {
    MessageOptions options;
    options.sparse_dim = gradient.sparse_dim();
    return options;
  }
  void start() { reduction->start(message, message.tensor(), kWhat); }
  void wait() { reduction->wait(kWhat, {}); }
};

at::Tensor wide_and_dense(const at::Tensor& tensor) {
  return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble).to_dense();
}

TEST(SparseReduction, EntriesOfThreeRanks_IsTheirSum_CoalescedAndOnEveryRankTheSameBits) {
  at::manual_seed(apex::testing::fresh_seed());
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    for (const Case& one : cases()) {
      std::vector<at::Tensor> given;
      at::Tensor expected =
          at::zeros(one.sizes, at::isComplexType(dtype) ? at::kComplexDouble : at::kDouble);
      for (int rank = 0; rank < kRanks; ++rank) {
        given.push_back(gradient_of(one, rank, dtype));
        expected += wide_and_dense(given.back());
      }
      std::vector<at::Tensor> sums(kRanks);
      run_ranks(kRanks, [&](int rank, const GroupPtr& group) {
        Bucket bucket(given[rank], group);
        bucket.start();
        bucket.wait();
        bucket.reduction->deliver(bucket.message);
        sums[rank] = bucket.message.tensor();
      });
      const double tolerance = dtype == at::kBFloat16 ? 0.1 : 1e-5;
      for (const at::Tensor& sum : sums) {
        const auto where = std::string(one.name) + ", " + c10::toString(dtype);
        EXPECT_EQ(sum.scalar_type(), dtype) << where;
        EXPECT_EQ(sum.sizes(), at::IntArrayRef(one.sizes)) << where;
        EXPECT_EQ(sum.sparse_dim(), one.sparse_dim()) << where;
        ASSERT_TRUE(sum.is_coalesced()) << where;
        EXPECT_EQ(sum._nnz(), one.distinct) << where;
        EXPECT_TRUE(at::allclose(wide_and_dense(sum), expected, tolerance, tolerance)) << where;
        EXPECT_TRUE(sum.indices().equal(sums[0].indices())) << where;
        EXPECT_TRUE(sum.values().equal(sums[0].values())) << where;
      }
    }
  }
}

// The other buckets are in flight before the host waits for the number of entries.
TEST(SparseReduction, Started_SendsNothingBeforeItIsWaitedFor_AndOnce) {
  const Case one = cases()[1];
  const auto control = ThreadBackendControl::create(kRanks);
  run_ranks(control, [&](int rank, const GroupPtr& group) {
    Bucket bucket(gradient_of(one, rank, at::kFloat), group);
    EXPECT_TRUE(bucket.reduction->traits().starts_at_wait);
    EXPECT_TRUE(bucket.reduction->traits().has_later_messages);
    EXPECT_FALSE(bucket.reduction->traits().averages);
    bucket.start();
    EXPECT_EQ(control->issued(rank), 0u);
    EXPECT_FALSE(bucket.reduction->done());
    bucket.wait();
    EXPECT_EQ(control->issued(rank), 3u);  // numbers, indices, values
    EXPECT_TRUE(bucket.reduction->done());
    bucket.wait();
    EXPECT_EQ(control->issued(rank), 3u);
    bucket.reduction->deliver(bucket.message);
    EXPECT_FALSE(bucket.reduction->done());
  });
}

TEST(SparseReduction, NoEntriesAnywhere_SendsTheirNumbersOnly) {
  const Case one = cases()[5];
  const auto control = ThreadBackendControl::create(kRanks);
  run_ranks(control, [&](int rank, const GroupPtr& group) {
    Bucket bucket(gradient_of(one, rank, at::kFloat), group);
    bucket.start();
    bucket.wait();
    EXPECT_EQ(control->issued(rank), 1u);
  });
}

TEST(SparseReduction, Dropped_IsNotSent_AndTheNextOneIsRight) {
  const Case one = cases()[0];
  const auto control = ThreadBackendControl::create(kRanks);
  run_ranks(control, [&](int rank, const GroupPtr& group) {
    Bucket bucket(gradient_of(one, rank, at::kFloat), group);
    bucket.start();
    bucket.reduction->drop();
    bucket.wait();
    EXPECT_EQ(control->issued(rank), 0u);
    EXPECT_FALSE(bucket.reduction->done());
    bucket.start();
    bucket.wait();
    bucket.reduction->deliver(bucket.message);
    EXPECT_EQ(bucket.message.tensor()._nnz(), one.distinct);
  });
}

// A rank's input gradient may have other readers, so the sum is a separate tensor.
TEST(SparseReduction, SumUnpacked_LeavesWhatWasPutIn) {
  for (const Case& one : {cases()[1], cases()[5]}) {
    run_ranks(kRanks, [&](int rank, const GroupPtr& group) {
      const at::Tensor gradient = gradient_of(one, rank, at::kDouble);
      const at::Tensor before = gradient.to_dense();
      Bucket bucket(gradient, group);
      bucket.start();
      bucket.wait();
      bucket.reduction->deliver(bucket.message);
      const at::Tensor sum = bucket.message.tensor().to_dense();
      bucket.message.unpack(0.5, {1});
      EXPECT_TRUE(gradient.to_dense().equal(before)) << one.name;
      EXPECT_TRUE(bucket.parameter.grad().to_dense().equal(sum * 0.5)) << one.name;
    });
  }
}

TEST(SparseReduction, ExchangeOfValuesFails_ThrowsWithRankAndOperation) {
  const Case one = cases()[1];
  const auto control = ThreadBackendControl::create(kRanks);
  control->fail(2, "cable");
  run_ranks(control, [&](int rank, const GroupPtr& group) {
    Bucket bucket(gradient_of(one, rank, at::kFloat), group);
    bucket.start();
    try {
      bucket.wait();
      ADD_FAILURE() << "no exception";
    } catch (const CommunicationError& error) {
      const std::string text = error.what();
      const std::string start =
          "rank " + std::to_string(rank) + " of 3: all-gather of a sparse gradient failed: cable";
      EXPECT_EQ(text.substr(0, start.size()), start);
    }
    EXPECT_FALSE(bucket.reduction->done());
  });
}

}  // namespace
}  // namespace apex::parallel::detail
