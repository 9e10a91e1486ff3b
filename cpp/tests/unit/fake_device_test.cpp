// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <support/fake_device.h>
#include <support/fake_group.h>
#include <support/toy_model.h>

// The other tests on the fake device rely on this: values are correct, and misuse is detected.

namespace apex::testing {
namespace {

using Strings = std::vector<std::string>;

class FakeDevice : public ::testing::Test {
 protected:
  void SetUp() override { fake::detector().reset(); }
  void TearDown() override {
    if (expects_errors_) return;
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }
  /// Expects this error instead of a clean run.
  void expect_error(const std::string& part) {
    expects_errors_ = true;
    const Strings errors = fake::detector().errors();
    ASSERT_FALSE(errors.empty()) << "nothing was found";
    EXPECT_NE(errors.front().find(part), std::string::npos) << errors.front();
  }
  bool expects_errors_ = false;
};

at::Tensor on_device(const at::Tensor& tensor) { return tensor.to(fake::device()); }

TEST_F(FakeDevice, Operators_ComputeWhatTheCpuComputes) {
  const at::Tensor x = random_batch(5, 4, 1);
  const at::Tensor y = random_batch(4, 3, 2);
  const auto compute = [](const at::Tensor& a, const at::Tensor& b) {
    at::Tensor c = at::tanh(a.mm(b)).t().contiguous();
    c.narrow(0, 1, 2).add_(1.5).mul_(c.select(0, 0));
    c.as_strided({3}, {5}).zero_();
    std::vector<at::Tensor> parts = at::split(c, 2);
    at::_foreach_mul_(parts, 2.0);
    return at::cat({c, c.to(at::kFloat).to(at::kDouble).div_(3)}).sum(1);
  };
  const at::Tensor result = compute(on_device(x), on_device(y));
  EXPECT_TRUE(result.is_privateuseone());
  EXPECT_TRUE(fake::peek(result).equal(compute(x, y)));
}

TEST_F(FakeDevice, Autograd_ComputesWhatTheCpuComputes) {
  ToyModel reference = ToyModel::mlp({6, 9, 3}, 3);
  ToyModel model = reference.clone(fake::device());
  const at::Tensor batch = random_batch(4, 6, 5);
  for (int step = 0; step < 2; ++step) {  // the second accumulates
    reference.forward(batch).square().mean().backward();
    model.forward(on_device(batch)).square().mean().backward();
  }
  for (size_t i = 0; i < model.size(); ++i) {
    EXPECT_LT(relative_error(fake::peek(model[i].grad()), reference[i].grad()), 1e-6);
  }
}

TEST_F(FakeDevice, ValuesTheHostReads_CountAsItsWaits) {
  const at::Tensor x = at::ones({3}, at::device(fake::device()));
  const at::Tensor y = x + 1;
  EXPECT_EQ(fake::detector().host_waits(), Strings{});
  EXPECT_EQ(y.sum().item<double>(), 6);
  EXPECT_EQ(fake::detector().host_waits(), Strings{"aten::_local_scalar_dense"});
  EXPECT_TRUE(y.cpu().equal(at::full({3}, 2.0)));
  EXPECT_EQ(fake::detector().host_waits().size(), 2);
  y.to(at::kCPU, at::kFloat, /*non_blocking=*/true);
  EXPECT_EQ(fake::detector().host_waits().size(), 2);
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(fake::current_stream());
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(fake::detector().host_waits().size(), 3);
}

TEST_F(FakeDevice, StreamThatDoesNotWait_IsFound) {
  const at::Tensor x = at::ones({3}, at::device(fake::device()));
  const c10::Stream main = fake::current_stream();
  const c10::StreamGuard guard(fake::new_stream("side"));
  const at::Tensor view = x.narrow(0, 1, 2);  // touches nothing
  EXPECT_EQ(fake::detector().errors(), Strings{});
  fake::order(main, fake::current_stream());
  view.add_(1);
  EXPECT_EQ(fake::detector().errors(), Strings{});
  {
    const c10::StreamGuard back(main);
    x.select(0, 0).add_(1);
    EXPECT_EQ(fake::detector().errors(), Strings{});
    const at::Tensor sum = x + x;
  }
  expect_error("on stream 'default' reads what aten::add");
}

TEST_F(FakeDevice, ResultsOfOperators_BelongToTheirStream) {
  const at::Tensor x = at::ones({3}, at::device(fake::device()));
  const at::Tensor made_by_the_kernel = x.dot(x);
  const at::Tensor made_before = x + x;
  const c10::StreamGuard guard(fake::new_stream("side"));
  const at::Tensor y = made_by_the_kernel + 1;
  EXPECT_EQ(fake::detector().errors().size(), 1);
  const at::Tensor z = made_before + 1;
  EXPECT_EQ(fake::detector().errors().size(), 2);
  expect_error("on stream 'side' reads what aten::dot on stream 'default' writes");
}

TEST_F(FakeDevice, MemoryOfAnotherStream_MustBeKept) {
  const c10::Stream main = fake::current_stream();
  const c10::Stream side = fake::new_stream("side");
  const auto use_and_free = [&](bool keep) {
    const at::Tensor x = at::ones({3}, at::device(fake::device()));
    fake::order(main, side);
    const c10::StreamGuard guard(side);
    if (keep) x.record_stream(side);
    const at::Tensor y = x + 1;
  };
  use_and_free(true);
  at::ones({3}, at::device(fake::device()));
  EXPECT_EQ(fake::detector().errors(), Strings{});
  EXPECT_EQ(fake::detector().uses_told(), 1);
  use_and_free(false);
  at::ones({3}, at::device(fake::device()));
  expect_error("record_stream() is missing");
}

TEST_F(FakeDevice, BackwardOfSeveralStreams_IsOrderedByAutograd) {
  // Uses none of our code: if torch's engine alone caused errors, findings elsewhere would mean
  // nothing.
  const c10::Stream main = fake::current_stream();
  const c10::Stream side = fake::new_stream("side");
  at::Tensor p = at::ones({3}, at::device(fake::device())).requires_grad_();
  for (int step = 0; step < 3; ++step) {
    fake::order(main, side);
    at::Tensor term;
    {
      const c10::StreamGuard guard(side);
      term = (p * 2).tanh().sum();
    }
    fake::order(side, main);
    (term + p.sum()).backward();
    at::NoGradGuard no_grad;
    p.sub_(p.grad());
    p.mutable_grad() = at::Tensor();
  }
  EXPECT_EQ(fake::detector().host_waits(), Strings{});
}

TEST_F(FakeDevice, CollectiveThatIsNotWaitedFor_IsFound) {
  const auto group = fake::make_mirror_group(3, "wire");
  std::vector<at::Tensor> message{at::ones({4}, at::device(fake::device()))};
  const auto work = group->allreduce(message);
  EXPECT_TRUE(fake::peek(message[0]).equal(at::full({4}, 3.0)));
  EXPECT_FALSE(work->isCompleted());
  work->wait();
  message[0].add_(1);
  EXPECT_EQ(fake::detector().errors(), Strings{});
  const auto again = group->allreduce(message);
  const c10::Stream side = fake::new_stream("side");
  {
    const c10::StreamGuard guard(side);
    again->getFuture()->wait();
    const at::Tensor y = message[0] + 1;
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
  EXPECT_EQ(fake::detector().host_waits(), Strings{});
  const at::Tensor y = message[0] + 1;
  expect_error("on stream 'default' reads what all-reduce on stream 'wire' writes");
}

}  // namespace
}  // namespace apex::testing
