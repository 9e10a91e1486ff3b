// SPDX-License-Identifier: BSD-3-Clause
#include "comm/endings.h"

#include <sys/wait.h>
#include <unistd.h>

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

// Hazard: a rank that was forked from a process that had ended a group never ends its own.
TEST(Endings, ForkedProcess_EndsItsOwnGroups) {
  end_elsewhere([] {}, /*may_be_stuck=*/false);
  finish_dropped_groups();
  const pid_t child = ::fork();
  if (child == 0) {
    auto* const ended = new std::atomic<bool>(false);
    end_elsewhere([ended] { *ended = true; }, /*may_be_stuck=*/false);
    finish_dropped_groups();
    ::_exit(*ended ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace apex::parallel
