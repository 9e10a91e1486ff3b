// SPDX-License-Identifier: BSD-3-Clause
#include "comm/endings.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

// Hazard: the thread that destroys a group releases a Python object after the interpreter has
// exited, which aborts the process.
TEST(Endings, GroupThatMayBeStuckAndIsNot_IsWaitedForAtTheEndOfTheProcess) {
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  end_elsewhere(
      [ended] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        *ended = true;
      },
      /*may_be_stuck=*/true);
  finish_dropped_groups();
  EXPECT_TRUE(*ended);
}

TEST(Endings, GroupThatIsStuck_IsLeft) {
  auto let_go = std::make_shared<std::promise<void>>();
  end_elsewhere([until = let_go->get_future().share()] { until.wait(); }, /*may_be_stuck=*/true);
  finish_dropped_groups();  // does not hang
  let_go->set_value();
}

}  // namespace
}  // namespace apex::parallel
