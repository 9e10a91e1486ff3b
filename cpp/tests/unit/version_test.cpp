// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <apex/version.h>

#include <string>

TEST(Version, String_Composed_HasThreeNumericParts) {
  const std::string expected = std::to_string(APEX_VERSION_MAJOR) + "." +
                               std::to_string(APEX_VERSION_MINOR) + "." +
                               std::to_string(APEX_VERSION_PATCH);
  EXPECT_EQ(APEX_VERSION, expected);
}
