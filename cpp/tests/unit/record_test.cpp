// SPDX-License-Identifier: BSD-3-Clause
// Oracle: a table of the ranks' records and the resulting decision of another rank.

#include "watch/record.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

RankRecord failed(const std::string& what, const Proof& proof = {}) {
  RankRecord record;
  record.failure = what;
  record.proof = proof;
  return record;
}

/// A rank that has called these in the channel "c".
RankRecord called(const std::vector<std::string>& names, int64_t before = 0) {
  RankRecord record;
  CallLog& log = record.calls["c"];
  log.number = before;
  for (const std::string& name : names) log.add(name);
  return record;
}

TEST(RankRecord, Encoded_IsDecodedAsItWas) {
  RankRecord record = failed("a \"b\" \\ of\ntwo lines", {{2, "has ended"}, {7, ""}});
  record.channel = "the \"other\" one";
  record.call = 3;
  record.what = "bucket \"2\", of backward number 5";
  record.waits = true;
  record.asked = 4;
  record.state = "two\nlines";
  record.cause = "why";
  record.calls = called({"x", "broadcast"}, 11).calls;
  const RankRecord read = RankRecord::decode(record.encode());
  EXPECT_EQ(read.encode(), record.encode());
  EXPECT_EQ(read.channel, record.channel);
  EXPECT_EQ(read.what, record.what);
  EXPECT_EQ(read.state, record.state);
  EXPECT_EQ(read.failure, record.failure);
  EXPECT_EQ(read.cause, record.cause);
  EXPECT_EQ(read.proof, record.proof);
  EXPECT_EQ(read.calls.at("c").name_of(12), "x");
}

TEST(RankRecord, DecodedFromWhatIsNoRecord_ReportsNothingAboutAnyRank) {
  for (const char* text : {"", "hello", "0 0", "-1 7", "1", "1 1", "\n\n"})
    EXPECT_TRUE(RankRecord::decode(text).proof.empty()) << text;
  EXPECT_LE(RankRecord::decode("\"a\" 1 \"b\" 0 0 0 99999999999 \"c\"").calls.size(), 1U);
}

TEST(CallLog, ManyCalls_TheLastAreKept) {
  CallLog log;
  for (int call = 1; call <= 20; ++call) log.add("call " + std::to_string(call));
  EXPECT_EQ(log.number, 20);
  EXPECT_EQ(log.name_of(20), "call 20");
  EXPECT_EQ(log.name_of(13), "call 13");
  EXPECT_EQ(log.name_of(12), "");
  EXPECT_EQ(log.name_of(21), "");
}

TEST(Dead, ReportsOfOthersAndProofAboutRanksWithoutOneAreTaken) {
  const Proof proof{{0, "is stopped"}, {1, "has ended"}, {3, "has ended"}};
  const Findings findings =
      dead({{0, failed("mine")}, {1, failed("b")}, {2, failed("c", proof)}}, 0);
  ASSERT_EQ(findings.reports.size(), 2u);
  EXPECT_EQ(findings.reports.at(1).failure, "b");
  EXPECT_EQ(findings.reports.at(2).failure, "c");
  // Rank 1 has reported since, and this rank was stopped and continues.
  EXPECT_EQ(findings.proof, (Proof{{3, "has ended"}}));
}

TEST(Apart, OtherCallUnderTheSameNumber_IsNamed) {
  EXPECT_EQ(apart(0, called({"a", "b"}), 1, called({"a", "c"})),
            "rank 0 is in: b, while rank 1 is in: c");
  EXPECT_EQ(apart(0, called({"a", "b", "c"}), 1, called({"a", "d"})),
            "rank 0 is in: b, while rank 1 is in: d");
}

TEST(Apart, RankIsLateOrCallsHaveTheSameNamesInCommon_IsNot) {
  EXPECT_EQ(apart(0, called({"a", "b", "c"}), 1, called({"a"})), "");
  EXPECT_EQ(apart(0, called({}), 1, called({"a"})), "");
  EXPECT_EQ(apart(0, called({"a", "b"}, 100), 1, called({"c"})), "");
  EXPECT_EQ(
      apart(0, called({"sum, of backward number 3"}), 1, called({"sum, of backward number 4"})),
      "");
}

// Two threads number their calls, and then issue them: the numbers may differ between the ranks.
TEST(Apart, ThreadsHaveMadeTheSameCallsInAnotherOrder_IsNot) {
  EXPECT_EQ(apart(0, called({"a", "step", "save"}), 1, called({"a", "save", "step"})), "");
}

TEST(Apart, CallsOfDifferentChannels_AreNotCompared) {
  RankRecord other = called({"save"});
  other.calls["d"] = other.calls["c"];
  other.calls.erase("c");
  EXPECT_EQ(apart(0, called({"step"}), 1, other), "");
}

}  // namespace
}  // namespace apex::parallel
