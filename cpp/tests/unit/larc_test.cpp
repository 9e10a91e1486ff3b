// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include <torch/optim.h>
#include <torch/types.h>

#include <apex/error.h>
#include <apex/optim.h>

namespace apex::parallel {
namespace {

using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<double>;

Tensor parameter(const Tensor& value) { return value.clone().requires_grad_(); }

Tensors random_parameters(at::ScalarType dtype = at::kFloat) {
  Tensors params;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 4}, {5}, {}, {2, 1, 3}}) {
    params.push_back(parameter(torch::randn(shape, at::kDouble).to(dtype)));
  }
  return params;
}

void set_gradients(const Tensors& params, double size = 1) {
  for (const Tensor& param : params) {
    param.mutable_grad() =
        (torch::randn(param.sizes(), at::kDouble) * size).to(param.scalar_type());
  }
}

Numbers numbers(const Tensor& tensor) {
  const Tensor flat = tensor.detach().to(at::kDouble).flatten().contiguous();
  return Numbers(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
}

/// One parameter after a LARC step around plain SGD, in plain arithmetic.
Numbers reference(const Numbers& p, const Numbers& g, double lr, double decay,
                  const LARCOptions& options) {
  double p_norm = 0, g_norm = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    p_norm += p[i] * p[i];
    g_norm += g[i] * g[i];
  }
  p_norm = std::sqrt(p_norm);
  g_norm = std::sqrt(g_norm);
  double factor = 1, share = 0;
  if (p_norm != 0 && g_norm != 0) {
    const double local =
        options.trust_coefficient() * p_norm / (g_norm + decay * p_norm + options.eps());
    factor = options.clip() ? std::min(local / lr, 1.0) : local;
    share = decay * factor;
  }
  Numbers result;
  for (size_t i = 0; i < p.size(); ++i)
    result.push_back(p[i] - lr * (factor * g[i] + share * p[i]));
  return result;
}

void expect_near(const Tensor& mine, const Numbers& expected, double tolerance) {
  const Numbers got = numbers(mine);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i])));
  }
}

LARCOptions larc_options(double trust, bool clip, double eps = 1e-8) {
  LARCOptions options;
  options.trust_coefficient(trust);
  options.clip(clip);
  options.eps(eps);
  return options;
}

TEST(LARC, Step_AnySizeDecayAndOptions_MatchesFloat64Reference) {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const bool clip : {true, false}) {
      for (const double decay : {0.0, 0.1}) {
        for (const double size : {1e-4, 1.0, 1e4}) {
          const LARCOptions options = larc_options(size == 1 ? 0.5 : 0.02, clip);
          const Tensors params = random_parameters(dtype);
          SGD wrapped(params, SGDOptions(0.1).weight_decay(decay));
          LARC optimizer(wrapped, options);
          for (int step = 0; step < 2; ++step) {
            set_gradients(params, size);
            std::vector<Numbers> expected;
            for (const Tensor& p : params) {
              expected.push_back(reference(numbers(p), numbers(p.grad()), 0.1, decay, options));
            }
            optimizer.step();
            for (size_t i = 0; i < params.size(); ++i) {
              expect_near(params[i], expected[i], dtype == at::kFloat ? 1e-5 : 1e-12);
            }
          }
        }
      }
    }
  }
}

TEST(LARC, Step_ZeroNormsAndMissingGradients_LeftAlone) {
  const Tensor zero = parameter(torch::zeros({2}));
  const Tensor without = parameter(torch::ones({2}));
  const Tensor silent = parameter(torch::ones({2}));
  SGD wrapped(Tensors{zero, without, silent}, SGDOptions(0.5).weight_decay(0.1));
  LARC optimizer(wrapped);
  zero.mutable_grad() = torch::ones({2});
  silent.mutable_grad() = torch::zeros({2});
  optimizer.step();
  EXPECT_EQ(numbers(zero), Numbers({-0.5, -0.5})) << "a parameter of norm zero takes a plain step";
  EXPECT_EQ(numbers(without), Numbers({1, 1}));
  EXPECT_EQ(numbers(silent), Numbers({1, 1})) << "no gradient, no decay";
}

TEST(LARC, Step_GroupsWithOwnSettingsAndMixedTypes_EachByItsOwn) {
  torch::manual_seed(2);
  const Tensors floats = random_parameters(at::kFloat), doubles = random_parameters(at::kDouble);
  Tensors first{floats[0], doubles[0], floats[1]}, second{doubles[1], floats[2]};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(first, std::make_unique<SGDOptions>(SGDOptions(0.1).weight_decay(0.2)));
  groups.emplace_back(second, std::make_unique<SGDOptions>(SGDOptions(0.01)));
  SGD wrapped(groups, SGDOptions(1.0));
  LARC optimizer(wrapped);
  set_gradients(first);
  set_gradients(second);
  std::vector<Numbers> expected;
  for (const Tensor& p : first) {
    expected.push_back(reference(numbers(p), numbers(p.grad()), 0.1, 0.2, LARCOptions()));
  }
  for (const Tensor& p : second) {
    expected.push_back(reference(numbers(p), numbers(p.grad()), 0.01, 0, LARCOptions()));
  }
  optimizer.step();
  for (size_t i = 0; i < 3; ++i) expect_near(first[i], expected[i], 1e-5);
  for (size_t i = 0; i < 2; ++i) expect_near(second[i], expected[3 + i], 1e-5);
  const auto& options = static_cast<SGDOptions&>(wrapped.param_groups()[0].options());
  EXPECT_EQ(options.weight_decay(), 0.2) << "decay is zero during the step only";
}

TEST(LARC, Step_LowPrecision_NormsDoNotOverflow) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const Tensor param = parameter(torch::full({1000}, 60, dtype));
    param.mutable_grad() = torch::full({1000}, 4096, dtype);  // its square overflows float16
    const auto expected = reference(numbers(param), numbers(param.grad()), 0.1, 0, LARCOptions());
    SGD wrapped(Tensors{param}, SGDOptions(0.1));
    LARC optimizer(wrapped);
    optimizer.step();
    EXPECT_TRUE(param.isfinite().all().item<bool>());
    expect_near(param, expected, 1e-2);
    EXPECT_LT(param.grad().abs().max().item<float>(), 4096) << "the gradient was not adapted";
  }
}

TEST(LARC, Step_Float16FactorBelowItsSmallestNumber_IsNotRoundedFirst) {
  for (const double decay : {0.0, 0.1}) {
    const Tensor param = parameter(torch::full({2}, decay == 0 ? 0.01 : 3e4, at::kHalf));
    param.mutable_grad() = torch::full({2}, decay == 0 ? 3e4 : 1, at::kHalf);
    const auto options = larc_options(decay == 0 ? 0.02 : 1e-9, /*clip=*/false);
    const auto expected = reference(numbers(param), numbers(param.grad()), 1, decay, options);
    const double change = numbers(param)[0] - expected[0];
    SGD wrapped(Tensors{param}, SGDOptions(1).weight_decay(decay));
    LARC optimizer(wrapped, options);
    optimizer.step();
    EXPECT_NEAR(numbers(param.grad())[0], change, 0.01 * change);
  }
}

/// With a gradient of ones, decay 0.1 and learning rate 1, the step leaves LARC's gradient.
template <typename Optimizer, typename Options>
void expect_decay_folded_in() {
  // Not parallel to the gradient of ones, since decay would then cancel out.
  const Tensor param = parameter(torch::tensor({-9.0f, 3.0f, 5.0f, 20.0f}));
  Optimizer wrapped(Tensors{param}, Options(1.0).weight_decay(0.1));
  LARC optimizer(wrapped);
  param.mutable_grad() = torch::ones_like(param);
  const double p_norm = param.detach().norm().template item<double>();
  const double factor = std::min(0.02 * p_norm / (2 + 0.1 * p_norm + 1e-8), 1.0);
  const Tensor expected = (1 + 0.1 * param.detach()) * factor;
  optimizer.step();
  EXPECT_TRUE(torch::allclose(param.grad(), expected, 1e-5)) << param.grad();
}

TEST(LARC, Step_EveryOptimizerOfTorch_TakesItsWeightDecay) {
  using namespace torch::optim;
  expect_decay_folded_in<SGD, SGDOptions>();
  expect_decay_folded_in<Adam, AdamOptions>();
  expect_decay_folded_in<AdamW, AdamWOptions>();
  expect_decay_folded_in<Adagrad, AdagradOptions>();
  expect_decay_folded_in<RMSprop, RMSpropOptions>();
}

TEST(LARC, Step_Closure_AdaptsAfterEachEvaluationAndReturnsTheLoss) {
  torch::manual_seed(3);
  const Tensor param = parameter(torch::randn({6}));
  torch::optim::LBFGS wrapped(Tensors{param}, torch::optim::LBFGSOptions(1.0).max_iter(4));
  LARC optimizer(wrapped);
  int evaluations = 0;
  std::vector<double> norms;
  const Tensor loss = optimizer.step([&] {
    if (param.grad().defined()) norms.push_back(param.grad().norm().item<double>());
    wrapped.zero_grad();
    EXPECT_FALSE(param.grad().defined());
    EXPECT_EQ(wrapped.param_groups().size(), 1u);
    const Tensor value = (param * torch::arange(1, 7)).square().sum();
    value.backward();
    ++evaluations;
    return value;
  });
  EXPECT_GT(evaluations, 1);
  EXPECT_GT(loss.item<double>(), 0);
  for (const double norm : norms) EXPECT_LT(norm, 1) << "a gradient was not adapted";
  EXPECT_EQ(wrapped.state().size(), 1u);
}

TEST(LARC, Step_ClosureThrows_GroupsStateAndDecayAreWhereTheyWere) {
  const Tensor param = parameter(torch::ones({2}));
  SGD wrapped(Tensors{param}, SGDOptions(0.1).momentum(0.9).weight_decay(0.5));
  LARC optimizer(wrapped);
  param.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_THROW(optimizer.step([]() -> Tensor { throw std::runtime_error("no data"); }),
               std::runtime_error);
  ASSERT_EQ(wrapped.param_groups().size(), 1u);
  EXPECT_EQ(wrapped.state().size(), 1u);
  const auto& options = static_cast<SGDOptions&>(wrapped.param_groups()[0].options());
  EXPECT_EQ(options.weight_decay(), 0.5);
  const double before = param[0].item<double>();
  optimizer.step();
  EXPECT_NE(param[0].item<double>(), before);
}

TEST(LARC, Step_GradientItCannotAdapt_ThrowsAndChangesNothing) {
  const Tensor dense = parameter(torch::ones({3})), sparse = parameter(torch::ones({3}));
  SGD wrapped(Tensors{dense, sparse}, SGDOptions(0.1).weight_decay(0.5));
  LARC optimizer(wrapped);
  dense.mutable_grad() = torch::ones({3});
  sparse.mutable_grad() = torch::ones({3}).to_sparse();
  try {
    optimizer.step();
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("parameter 1 of group 0"), std::string::npos);
  }
  EXPECT_EQ(numbers(dense), Numbers({1, 1, 1}));
  EXPECT_EQ(numbers(dense.grad()), Numbers({1, 1, 1}));
  EXPECT_EQ(static_cast<SGDOptions&>(wrapped.param_groups()[0].options()).weight_decay(), 0.5);
}

TEST(LARC, Options_OutOfRange_ThrowInvalidArgument) {
  const Tensors params{parameter(torch::ones({1}))};
  SGD wrapped(params, SGDOptions(0.1));
  const auto make = [&](const LARCOptions& options) { LARC(wrapped, options); };
  EXPECT_NO_THROW(make(larc_options(0.02, true, 0)));
  EXPECT_THROW(make(larc_options(0, true)), InvalidArgument);
  EXPECT_THROW(make(larc_options(-1, true)), InvalidArgument);
  EXPECT_THROW(make(larc_options(NAN, true)), InvalidArgument);
  EXPECT_THROW(make(larc_options(0.02, true, -1)), InvalidArgument);
  EXPECT_THROW(make(larc_options(0.02, true, INFINITY)), InvalidArgument);
}

}  // namespace
}  // namespace apex::parallel
