// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "step/report_exchange.h"

// Report rows sent in the sum of a bucket, tested without ranks: each rank's row is added up.

namespace apex::parallel::detail {
namespace {

Membership member(int rank, int size) {
  Membership members;
  members.rank = rank;
  members.size = size;
  return members;
}

// Hazards: pieces that are not exact in the bucket's dtype, a divided sum, and other ranks' zeros
// that are not zero.
TEST(ReportExchange, RowsInASum_DividedOrNot_AreThoseOfEachRank) {
  constexpr size_t kParameters = 70;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const int size : {2, 3, 7, 100}) {
      for (const bool divided : {false, true}) {
        at::Tensor sum;
        std::vector<StepReport> sent;
        for (int rank = 0; rank < size; ++rank) {
          const Membership members = member(rank, size);
          const at::Tensor tail = at::full({ReportExchange::tail_size(members, kParameters)},
                                           std::numeric_limits<double>::quiet_NaN(), dtype);
          StepReport report;
          report.backward = 1000 + rank;
          report.failed = rank % 3 == 1;
          report.non_finite = rank % 2 == 0 ? -1 : rank;
          report.facts.moved = 0.1 * rank;
          report.facts.sample = std::numeric_limits<int64_t>::min() + rank;
          report.settings = -rank;
          std::vector<uint8_t> used(kParameters);
          used[static_cast<size_t>(rank) % kParameters] = 1;
          ReportExchange(members, kParameters)
              .write(report, used, std::vector<bool>(kParameters, rank % 2 == 0), tail);
          sum = sum.defined() ? sum + tail : tail;
          sent.push_back(report);
        }
        if (divided) sum = sum.div(size);
        const Membership members = member(0, size);
        ReportExchange exchange(members, kParameters);
        int waits = 0;
        exchange.sent_behind([&] { return waits > 0; },
                             [&](const std::function<void()>&) {
                               ++waits;
                               return sum;
                             },
                             divided ? size : 1);
        EXPECT_TRUE(exchange.sent());
        EXPECT_EQ(exchange.peek(), nullptr);
        const StepTable& table = exchange.receive({});
        EXPECT_EQ(&exchange.receive({}), &table);
        EXPECT_EQ(waits, 1);
        for (int rank = 0; rank < size; ++rank) {
          const StepReport& read = table.of(rank);
          EXPECT_EQ(read.backward, sent[rank].backward);
          EXPECT_EQ(read.failed, sent[rank].failed);
          EXPECT_EQ(read.non_finite, sent[rank].non_finite);
          EXPECT_EQ(read.facts.moved, sent[rank].facts.moved);
          EXPECT_EQ(read.facts.sample, sent[rank].facts.sample);
          EXPECT_EQ(read.settings, sent[rank].settings);
          EXPECT_EQ(table.trainable(rank, 3), rank % 2 == 0);
        }
        const std::vector<uint8_t> used = table.used_by_any();
        for (size_t i = 0; i < kParameters; ++i)
          EXPECT_EQ(used[i] != 0, static_cast<int>(i) < size || size > 70) << size << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace apex::parallel::detail
