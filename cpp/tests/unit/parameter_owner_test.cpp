// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "reducer/parameter_owner.h"

namespace apex::parallel {
namespace {

TEST(ParameterOwner, OneParameter_AllWhoAsk_ShareOnePlaceAsLongAsOneHoldsIt) {
  const at::Tensor parameter = at::zeros({2});
  auto first = owner_of(parameter);
  EXPECT_EQ(first->load(), nullptr);
  first->store(this);
  const auto second = owner_of(parameter.alias());  // another tensor with the same memory
  EXPECT_EQ(second->load(), nullptr);
  auto third = owner_of(parameter);
  EXPECT_EQ(third, first);
  first.reset();
  EXPECT_EQ(owner_of(parameter)->load(), this);
  third.reset();
  EXPECT_EQ(owner_of(parameter)->load(), nullptr);  // no reference was left
}

}  // namespace
}  // namespace apex::parallel
