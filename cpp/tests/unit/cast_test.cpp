// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <apex/amp/cast.h>

namespace apex::amp {
namespace {

at::Tensor weight() {
  return at::arange(6, at::kFloat).view({3, 2}).requires_grad_();  // exact in bfloat16
}

TEST(Cast, DenseGradient_ArrivesInTheDtypeOfTheParameter) {
  const at::Tensor parameter = weight();
  const at::Tensor low = cast(parameter, at::kBFloat16);
  EXPECT_EQ(low.scalar_type(), at::kBFloat16);
  (low * low).sum().backward();
  EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(parameter.grad(), 2 * parameter.detach()));
}

TEST(Cast, SparseGradient_StaysSparse) {
  const at::Tensor parameter = weight();
  const at::Tensor rows = at::embedding(cast(parameter, at::kBFloat16), at::tensor({1, 1}),
                                        /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                                        /*sparse=*/true);
  rows.sum().backward();
  EXPECT_TRUE(parameter.grad().is_sparse());
  EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(parameter.grad().to_dense().sum().item<float>(), 4.0F);
}

TEST(Cast, SecondDerivative_IsThatOfTo) {
  const at::Tensor parameter = weight();
  const at::Tensor low = cast(parameter, at::kBFloat16);
  const auto first = torch::autograd::grad({(low * low * low).sum()}, {parameter}, {}, std::nullopt,
                                           /*create_graph=*/true);
  EXPECT_EQ(first[0].scalar_type(), at::kFloat);
  const auto second = torch::autograd::grad({first[0].sum()}, {parameter});
  EXPECT_TRUE(at::equal(second[0], 6 * parameter.detach()));
}

TEST(Cast, NoGradient_IsRecordedByNobody) {
  EXPECT_FALSE(cast(weight().detach(), at::kHalf).requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(cast(weight(), at::kHalf).requires_grad());
}

}  // namespace
}  // namespace apex::amp
