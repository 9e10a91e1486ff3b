// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <apex/error.h>
#include <apex/parallel/overlap_report.h>

namespace apex::parallel {
namespace {

/// {launched, arrived, awaited}
BucketOverlap bucket(double launched_s, double arrived_s, double awaited_s) {
  BucketOverlap times;
  times.parameters = {0};
  times.launched_s = launched_s;
  times.arrived_s = arrived_s;
  times.awaited_s = awaited_s;
  return times;
}

struct Case {
  const char* name;
  double last_gradient_s;
  double backward_s;
  std::vector<BucketOverlap> buckets;
  double communication_s;
  double exposed_s;
  double hidden_fraction;
  std::vector<double> exposed_by_bucket;
};

TEST(OverlapReport, TimesOfBuckets_AreSummarized) {
  const std::vector<Case> cases{
      {"no bucket", 3, 4, {}, 0, 0, 1, {}},
      {"arrived before the last gradient", 10, 11, {bucket(2, 5, 10)}, 3, 0, 1, {0}},
      {"launched after it", 10, 14, {bucket(11, 14, 11)}, 3, 3, 0, {3}},
      {"half of it", 10, 12, {bucket(8, 12, 10)}, 4, 2, 0.5, {2}},
      {"two at once count once",
       10,
       12,
       {bucket(4, 11, 10), bucket(6, 12, 11)},
       8,
       2,
       0.75,
       {1, 2}},
      {"one within the other", 10, 10, {bucket(1, 9, 10), bucket(2, 3, 10)}, 8, 0, 1, {0, 0}},
      {"a pause between", 10, 13, {bucket(1, 2, 10), bucket(11, 13, 11)}, 3, 2, 1.0 / 3, {0, 2}},
      {"in another order", 10, 13, {bucket(11, 13, 11), bucket(1, 2, 10)}, 3, 2, 1.0 / 3, {2, 0}},
      {"awaited while gradients are computed", 10, 11, {bucket(1, 5, 2)}, 4, 0, 1, {0}},
      {"no time at all", 10, 10, {bucket(4, 4, 10)}, 0, 0, 1, {0}},
      // A deferred backward: the next forward hides the rest until it waits.
      {"there before it is awaited", 10, 10, {bucket(9, 15, 16)}, 6, 0, 1, {0}},
      {"awaited before it is there", 10, 10, {bucket(9, 15, 12)}, 6, 3, 0.5, {3}},
      {"waiting exposes all that are in flight",
       10,
       11,
       {bucket(9, 15, 13), bucket(12, 18, 18)},
       9,
       3,
       2.0 / 3,
       {3, 2}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const OverlapReport report =
        summarize_overlap(c.last_gradient_s, c.backward_s, c.buckets, OverlapClock::kDevice);
    EXPECT_EQ(report.clock, OverlapClock::kDevice);
    EXPECT_EQ(report.last_gradient_s, c.last_gradient_s);
    EXPECT_EQ(report.backward_s, c.backward_s);
    EXPECT_DOUBLE_EQ(report.communication_s, c.communication_s);
    EXPECT_DOUBLE_EQ(report.exposed_s, c.exposed_s);
    EXPECT_DOUBLE_EQ(report.hidden_s, c.communication_s - c.exposed_s);
    EXPECT_DOUBLE_EQ(report.hidden_fraction, c.hidden_fraction);
    ASSERT_EQ(report.buckets.size(), c.buckets.size());
    for (size_t b = 0; b < c.buckets.size(); ++b) {
      EXPECT_DOUBLE_EQ(report.buckets[b].exposed_s, c.exposed_by_bucket[b]) << "bucket " << b;
      EXPECT_EQ(report.buckets[b].launched_s, c.buckets[b].launched_s);
    }
  }
}

TEST(OverlapReport, TimesOutOfOrder_ThrowInvalidArgument) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(summarize_overlap(2, 1, {}), InvalidArgument);
  EXPECT_THROW(summarize_overlap(nan, 1, {}), InvalidArgument);
  EXPECT_THROW(summarize_overlap(0, std::numeric_limits<double>::infinity(), {}), InvalidArgument);
  EXPECT_THROW(summarize_overlap(1, 2, {bucket(3, 2, 1)}), InvalidArgument);
  EXPECT_THROW(summarize_overlap(1, 2, {bucket(nan, 2, 1)}), InvalidArgument);
  EXPECT_THROW(summarize_overlap(1, 2, {bucket(1, 2, nan)}), InvalidArgument);
  BucketOverlap unready = bucket(1, 2, 1);
  unready.ready_s = 1.5;
  EXPECT_THROW(summarize_overlap(1, 2, {unready}), InvalidArgument);
  try {
    summarize_overlap(1, 2, {bucket(0, 1, 1), bucket(3, 2, 1)});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("bucket 1"), std::string::npos) << error.what();
  }
}

TEST(OverlapReport, Text_HasTheSumsAndARowPerBucket) {
  BucketOverlap first = bucket(0.0015, 0.0045, 0.01);
  first.ready_s = 0.00125;
  first.bytes = 3 << 20;
  first.parameters = {4, 5};
  first.names = {"fc2.weight", "fc2.bias"};
  BucketOverlap second = bucket(0.009, 0.012, 0.01);
  second.bytes = 1 << 19;
  second.names = {"fc1.weight"};
  BucketOverlap numbers = bucket(0.012, 0.012, 0.012);
  numbers.parameters.clear();
  const OverlapReport report = summarize_overlap(0.01, 0.0125, {first, second, numbers});
  const std::string text = to_string(report);
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 6u) << text;
  EXPECT_EQ(text.back(), '\n');
  EXPECT_EQ(lines[0], "backward 12.50 ms, last gradient after 10.00 ms");
  EXPECT_EQ(lines[1],
            "3 buckets, 3.50 MiB, in flight for 6.00 ms: 4.00 ms hidden (67 %), 2.00 ms exposed");
  EXPECT_EQ(lines[2],
            "bucket       MiB     ready  launched   arrived in flight   exposed  parameters");
  EXPECT_EQ(lines[3],
            "     0     3.000      1.25      1.50      4.50      3.00      0.00  fc2.weight to "
            "fc2.bias (2)");
  EXPECT_EQ(lines[4],
            "     1     0.500      0.00      9.00     12.00      3.00      2.00  fc1.weight");
  EXPECT_EQ(lines[5],
            "     2     0.000      0.00     12.00     12.00      0.00      0.00  0 parameters");
  EXPECT_NE(to_string(summarize_overlap(1, 1, {}, OverlapClock::kDevice)).find("(device times)"),
            std::string::npos);
  EXPECT_NE(
      to_string(summarize_overlap(1, 1, {}, OverlapClock::kHostOnly)).find("not of the device"),
      std::string::npos);
}

}  // namespace
}  // namespace apex::parallel
