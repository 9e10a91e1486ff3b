// SPDX-License-Identifier: BSD-3-Clause
#include "comm/bounded_call.h"

#include <future>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::minutes kLong{1};

TEST(BoundedCall, BodyEnds_IsSeenWithItsError) {
  BoundedCall call([](const std::atomic<bool>&) { throw std::runtime_error("as it should"); });
  ASSERT_TRUE(call.wait_until(Clock::now() + kLong));
  EXPECT_THROW(std::rethrow_exception(call.error()), std::runtime_error);
}

TEST(BoundedCall, BodyBlocks_IsLeftBehindAndToldToStop) {
  auto stopped = std::make_shared<std::promise<void>>();
  auto ended = stopped->get_future();
  {
    BoundedCall call([stopped](const std::atomic<bool>& stop) {
      while (!stop) std::this_thread::yield();
      stopped->set_value();
    });
    EXPECT_FALSE(call.wait_until(Clock::now()));
  }
  EXPECT_EQ(ended.wait_for(kLong), std::future_status::ready);
}

TEST(BoundedCall, BodyHasEnded_HoldsNothingAnyMore) {
  auto held = std::make_shared<int>(1);
  BoundedCall call([held](const std::atomic<bool>&) {});
  ASSERT_TRUE(call.wait_until(Clock::now() + kLong));
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace apex::parallel
