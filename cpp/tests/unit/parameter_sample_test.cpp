// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "step/parameter_sample.h"

namespace apex::parallel {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Writes like libtorch's SGD, which does not bump the version of `parameter`.
void write_behind(const at::Tensor& parameter, double value) {
  parameter.variable_data().add_(value);
}

TEST(ParameterSample, WriteThatMovesNoVersion_IsNoticedInEveryDtype_Once) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor parameter = at::zeros({3, 5}, dtype);
    ParameterSample sample;
    sample.watch({parameter});
    EXPECT_FALSE(sample.empty());
    const auto version = parameter._version();
    write_behind(parameter, 0.25);
    EXPECT_EQ(parameter._version(), version);
    const ParameterSample::Change change = sample.take();
    EXPECT_TRUE(change.any) << dtype;
    EXPECT_GT(change.distance, 0) << dtype;
    EXPECT_FALSE(sample.take().any) << dtype;
  }
}

TEST(ParameterSample, FirstAndLastElementsOfFirstAndLastParameters_AreAmongThem) {
  for (const int64_t count : {1, 2, 3, 8, 9, 400}) {
    for (const int64_t numel : {1, 2, 4, 5, 1000}) {
      Tensors parameters;
      for (int64_t i = 0; i < count; ++i) parameters.push_back(at::zeros({numel}));
      ParameterSample sample;
      sample.watch(parameters);
      for (const int64_t parameter : {int64_t{0}, count - 1}) {
        for (const int64_t element : {int64_t{0}, numel - 1}) {
          write_behind(parameters[parameter][element], 1);
          EXPECT_EQ(sample.take().distance, 1) << count << ' ' << numel;
        }
      }
    }
  }
}

TEST(ParameterSample, Distance_IsTheSumOfAbsoluteDifferences) {
  const at::Tensor parameter = at::zeros({4});
  ParameterSample sample;
  sample.watch({parameter});
  parameter.copy_(at::tensor({1.0F, -2.0F, 0.0F, 0.5F}));
  EXPECT_EQ(sample.take().distance, 3.5);
}

TEST(ParameterSample, NanThatStays_HasNotMoved) {
  const at::Tensor parameter = at::full({4}, std::numeric_limits<float>::quiet_NaN());
  ParameterSample sample;
  sample.watch({parameter});
  EXPECT_FALSE(sample.take().any);
  parameter.zero_();
  EXPECT_TRUE(sample.take().any);
}

TEST(ParameterSample, WhatCannotBeReadInPlace_IsPassedOver) {
  const Tensors parameters{
      at::zeros({2}).expand({3, 2}), at::empty({2}, at::TensorOptions().device(at::kMeta)),
      at::zeros({2, 2}).to_sparse(), at::zeros({0}),
      at::zeros({2}, at::kLong),     at::zeros({2, 8}).slice(1, 0, 8, 2)};
  ParameterSample sample;
  sample.watch(parameters);
  EXPECT_TRUE(sample.empty());
  EXPECT_FALSE(sample.take().any);
  sample.watch({});
  EXPECT_TRUE(sample.empty());
}

// Hazard: an old address is read after its memory was freed.
TEST(ParameterSample, ParameterThatBecameAnother_IsReadWhereItIs_OrNotAtAll) {
  at::Tensor parameter = at::zeros({4});
  ParameterSample sample;
  sample.watch({parameter});
  parameter.set_data(at::ones({4}));
  EXPECT_EQ(sample.take().distance, 4);
  parameter.set_data(at::ones({4}, at::kDouble));
  EXPECT_FALSE(sample.take().any);
  parameter.set_data(at::ones({1}));
  EXPECT_FALSE(sample.take().any);
}

// Hazard: a rank that flushes denormals reads zeros where other ranks do not.
TEST(ParameterSample, DenormalNumbersWhereTheyAreFlushed_AreReadAsTheyAre) {
  const at::Tensor parameter = at::full({4}, 1e-40F);
  ParameterSample usual, flushing;
  usual.watch({parameter});
  const bool can = at::globalContext().setFlushDenormal(true);
  flushing.watch({parameter});
  const bool changed = usual.take().any;
  at::globalContext().setFlushDenormal(false);
  if (!can) GTEST_SKIP() << "this processor does not flush";
  EXPECT_FALSE(changed);
  EXPECT_EQ(flushing.fingerprint(), usual.fingerprint());
}

}  // namespace
}  // namespace apex::parallel
