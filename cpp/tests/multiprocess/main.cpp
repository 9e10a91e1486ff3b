// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <support/processes.h>

int main(int argc, char** argv) {
  if (const auto status = apex::testing::run_scenario(argc, argv)) {
    return *status;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
