// SPDX-License-Identifier: BSD-3-Clause
// The C++ interface: module and conversion, with ranks as threads.

#include <apex/error.h>
#include <apex/parallel/sync_batch_norm.h>
#include <gtest/gtest.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "batch_norm/sync_batch_norm_ops.h"
#include "torch_version.h"

namespace apex::parallel {
namespace {

using apex::testing::expect_contains;
using apex::testing::make_thread_group;
using apex::testing::message_of;
using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;

TEST(SyncBatchNorm, Forward_NoGroup_EqualsBatchNorm) {
  SyncBatchNorm ours(3);
  torch::nn::BatchNorm2d theirs(3);
  for (const bool training : {true, true, false}) {
    ours->train(training);
    theirs->train(training);
    const auto x = torch::randn({4, 3, 5, 7});
    EXPECT_TRUE(torch::allclose(ours(x), theirs(x), 1e-5, 1e-6));
  }
  EXPECT_TRUE(torch::allclose(ours->running_var, theirs->running_var));
  EXPECT_EQ(ours->num_batches_tracked.item<int64_t>(), 2);
}

TEST(SyncBatchNorm, Forward_ThreeUnevenRanks_EqualsWholeBatch) {
  const auto all = torch::randn({6, 4, 5}, torch::kDouble);
  const int64_t cuts[] = {0, 1, 1, 6};  // 1, 0 and 5 samples
  const auto whole = all.clone().requires_grad_();
  const auto want = torch::nn::functional::batch_norm(
      whole, {}, {}, torch::nn::functional::BatchNormFuncOptions().training(true));
  want.pow(3).sum().backward();
  run_ranks(3, [&](int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    SyncBatchNormOptions options(4);
    options.affine(false);
    options.process_group(group);
    SyncBatchNorm module(options);
    module->to(torch::kDouble);
    const auto x = all.slice(0, cuts[rank], cuts[rank + 1]).clone().requires_grad_();
    const auto y = module(x);
    y.pow(3).sum().backward();
    const auto slice = [&](const at::Tensor& t) { return t.slice(0, cuts[rank], cuts[rank + 1]); };
    EXPECT_TRUE(torch::allclose(y, slice(want), 1e-9, 1e-10)) << "rank " << rank;
    EXPECT_TRUE(torch::allclose(x.grad(), slice(whole.grad()), 1e-9, 1e-10)) << "rank " << rank;
    EXPECT_TRUE(torch::allclose(module->running_var,
                                all.transpose(0, 1).reshape({4, -1}).var(1) * 0.1 + 0.9));
  });
}

/// The layer needs the result immediately: on NCCL's own stream it would have to wait twice.
TEST(SyncBatchNorm, Exchanges_AreAskedForOnTheCurrentStream) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    SyncBatchNorm module(SyncBatchNormOptions(3).process_group(group));
    module(torch::randn({4, 3}).requires_grad_()).square().sum().backward();
    const auto log = control->log(rank);
    ASSERT_EQ(log.size(), 2U);
    EXPECT_EQ(log[0].op, "_allgather_base");
    EXPECT_FALSE(log[0].async_op);
#if APEX_TORCH_AT_LEAST(2, 8)  // older versions do not pass on an all-reduce's option
    EXPECT_FALSE(log[1].async_op);
#endif
  });
}

TEST(SyncBatchNorm, Forward_OneValueInAll_ThrowsInvalidArgumentOnEveryRank) {
  run_ranks(2, [](int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    SyncBatchNorm module(SyncBatchNormOptions(3).process_group(group));
    EXPECT_THROW(module(torch::randn({rank, 3})), InvalidArgument);
    EXPECT_NO_THROW(module(torch::randn({1, 3})));
  });
}

/// A saved graph contains the group's name and finds the group of that name in the loading process.
TEST(SyncBatchNorm, GroupThatHasAName_IsKnownByThatNameAndNoOther) {
  run_ranks(1, [](int, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    const std::string name = "of the sync batch norm test";
    group->setGroupName(name);
    for (int time = 0; time < 2; ++time) {
      EXPECT_EQ(process_group_name(group), name);
      EXPECT_EQ(c10d::resolve_process_group(name), group);
    }
    c10d::unregister_process_group(name);
  });
}

TEST(SyncBatchNorm, GroupWhoseNameIsTaken_KeepsOneOtherName) {
  run_ranks(1, [](int, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    const std::string name = "taken in the sync batch norm test";
    group->setGroupName(name);
    ASSERT_EQ(process_group_name(group), name);
    auto other = make_thread_group(0, ThreadBackendControl::create(1));
    other->setGroupName(name);
    const std::string given = process_group_name(other);
    EXPECT_NE(given, name);
    EXPECT_EQ(process_group_name(other), given);
    EXPECT_EQ(c10d::resolve_process_group(given), other);
    c10d::unregister_all_process_groups();  // as torch's destroy_process_group()
    EXPECT_EQ(process_group_name(other), given);
    EXPECT_EQ(c10d::resolve_process_group(given), other);
    other.reset();
    EXPECT_THROW(c10d::resolve_process_group(given), std::exception);
  });
}

TEST(SyncBatchNorm, InputOrOptionsThatDoNotFit_AreRefusedByThisLibrarysErrors) {
  SyncBatchNorm layer(3);
  EXPECT_THROW(layer(torch::randn({4, 5})), InvalidArgument);
  EXPECT_THROW(layer(torch::randn({4})), InvalidArgument);
  EXPECT_THROW(layer(torch::ones({4, 3}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(SyncBatchNorm(0), InvalidArgument);
  EXPECT_THROW(layer(at::Tensor()), InvalidArgument);
  layer->eval();
  EXPECT_THROW(layer(at::Tensor()), InvalidArgument);
  const at::Tensor ones = torch::ones({3});
  EXPECT_THROW(SyncBatchNormImpl(3, {}, {}, ones, {}, {}), InvalidArgument);
  EXPECT_THROW(SyncBatchNormImpl(3, {}, {}, {}, ones, {}), InvalidArgument);
  SyncBatchNormImpl without_counter(3, {}, {}, ones.clone(), ones.clone(), {});
  without_counter.reset_running_stats();
  EXPECT_TRUE(without_counter.running_mean.equal(torch::zeros({3})));
  run_ranks(1, [](int, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    SyncBatchNormOptions both(3);
    both.process_group(group);
    both.this_rank_alone(true);
    EXPECT_THROW(SyncBatchNorm{both}, InvalidArgument);
  });
}

TEST(SyncBatchNorm, Forward_AddAndRelu_FollowTheNormalization) {
  SyncBatchNormOptions options(3);
  options.fuse_relu(true);
  options.channel_last(true);
  SyncBatchNorm module(options);
  const auto x = torch::randn({4, 5, 3}), z = torch::randn({4, 5, 3});
  torch::nn::BatchNorm1d plain(3);
  const auto want = (plain(x.transpose(1, 2)).transpose(1, 2) + z).relu();
  EXPECT_TRUE(torch::allclose(module(x, z), want, 1e-5, 1e-6));
}

TEST(SyncBatchNorm, Clone_SharesGroupAndCopiesTensors) {
  SyncBatchNormOptions options(2);
  options.momentum(std::nullopt);
  SyncBatchNorm module(options);
  module(torch::randn({3, 2}));
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(module->clone());
  EXPECT_TRUE(torch::equal(copy->running_mean, module->running_mean));
  EXPECT_NE(copy->running_mean.data_ptr(), module->running_mean.data_ptr());
  EXPECT_FALSE(copy->options.momentum().has_value());
}

torch::nn::Sequential small_model() {
  torch::nn::Sequential model;
  model->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
  model->push_back("bn", torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(4).eps(1e-3)));
  model->push_back("relu", torch::nn::ReLU());
  return model;
}

TEST(SyncBatchNormConvert, Sequential_KeepsTensorsNamesAndOutput) {
  auto model = small_model();
  const auto bn = std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(model->ptr(1));
  bn->weight.set_requires_grad(false);
  bn->eval();
  const auto x = torch::randn({2, 3, 8, 8});
  const auto want = model->forward(x);
  convert_sync_batch_norm(*model);
  const auto* sync = model->ptr(1)->as<SyncBatchNormImpl>();
  EXPECT_TRUE(sync->weight.is_same(bn->weight));
  EXPECT_TRUE(sync->running_var.is_same(bn->running_var));
  EXPECT_FALSE(sync->weight.requires_grad());
  EXPECT_FALSE(sync->is_training());
  EXPECT_EQ(sync->options.eps(), 1e-3);
  EXPECT_TRUE(torch::allclose(model->forward(x), want, 1e-5, 1e-6));
  using Options = torch::nn::BatchNorm2dOptions;
  torch::nn::Sequential bare(torch::nn::BatchNorm2d(Options(3).track_running_stats(false)));
  convert_sync_batch_norm(*bare);
  EXPECT_FALSE(bare->ptr(0)->as<SyncBatchNormImpl>()->options.track_running_stats());
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() { bn = register_module("bn", torch::nn::BatchNorm2d(4)); }
  at::Tensor forward(const at::Tensor& x) { return bn(x); }
  torch::nn::BatchNorm2d bn{nullptr};
};
TORCH_MODULE(Block);

TEST(SyncBatchNormConvert, TypedMember_IsRefusedByNameAndNothingChanges) {
  torch::nn::Sequential model;
  model->push_back("bn", torch::nn::BatchNorm2d(4));
  model->push_back("block", Block());
  expect_contains(message_of<InvalidArgument>([&] { convert_sync_batch_norm(*model); }),
                  "'block.bn'");
  EXPECT_NE(model->ptr(0)->as<torch::nn::BatchNorm2dImpl>(), nullptr);
}

struct ScaledBatchNormImpl : torch::nn::BatchNorm2dImpl {
  using torch::nn::BatchNorm2dImpl::BatchNorm2dImpl;
  at::Tensor forward(const at::Tensor& x) { return 2 * torch::nn::BatchNorm2dImpl::forward(x); }
};
TORCH_MODULE(ScaledBatchNorm);

TEST(SyncBatchNormConvert, DerivedClass_IsRefusedByNameAndNothingChanges) {
  torch::nn::Sequential model;
  model->push_back("bn", torch::nn::BatchNorm2d(4));
  model->push_back("scaled", ScaledBatchNorm(4));
  expect_contains(message_of<InvalidArgument>([&] { convert_sync_batch_norm(*model); }),
                  "'scaled': its class is derived");
  EXPECT_NE(model->ptr(0)->as<torch::nn::BatchNorm2dImpl>(), nullptr);
}

TEST(SyncBatchNormConvert, ModelItselfInPlace_IsRefused) {
  torch::nn::BatchNorm2d bn(4);
  EXPECT_THROW(convert_sync_batch_norm(*bn), InvalidArgument);
}

/// Children of every kind in which a BatchNorm can be replaced.
struct NetworkImpl : torch::nn::Module {
  NetworkImpl() {
    shared = torch::nn::BatchNorm2d(4);
    body = register_module("body", small_model());
    list = register_module("list", torch::nn::ModuleList());
    list->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 1)));
    list->push_back(shared);
    torch::nn::ModuleDict inner;
    inner->update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
        {"again", shared.ptr()}, {"deep", small_model().ptr()}});
    dict = register_module("dict", inner);
  }
  at::Tensor forward(at::Tensor x) {
    x = body->forward(x);
    for (const auto& module : {list->ptr(1), dict[std::string("again")]}) {
      if (auto* sync = module->as<SyncBatchNormImpl>()) {
        x = sync->forward(x);
      } else {
        x = module->as<torch::nn::BatchNorm2dImpl>()->forward(x);
      }
    }
    return x;
  }
  torch::nn::BatchNorm2d shared{nullptr};
  torch::nn::Sequential body{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::ModuleDict dict{nullptr};
};
TORCH_MODULE(Network);

TEST(SyncBatchNormConvert, ContainersInAModuleInPlace_KeepNamesSharingAndOutput) {
  Network model;
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& entry : model->named_modules()) all.push_back(entry.key());
    for (const auto& entry : model->named_parameters()) all.push_back(entry.key());
    return all;
  };
  const auto count = [&](auto* type) {
    size_t found = 0;
    for (const auto& module : model->modules()) {
      found += module->as<std::remove_pointer_t<decltype(type)>>() != nullptr;
    }
    return found;
  };
  const auto before = names();
  const auto x = torch::randn({2, 3, 8, 8});
  const auto want = model->forward(x);

  convert_sync_batch_norm(*model);
  EXPECT_EQ(names(), before);
  EXPECT_EQ(count(static_cast<SyncBatchNormImpl*>(nullptr)), 4);  // one of them occurs twice
  EXPECT_EQ(count(static_cast<torch::nn::BatchNorm2dImpl*>(nullptr)), 0);
  EXPECT_EQ(model->list->ptr(1), model->dict[std::string("again")]);
  EXPECT_EQ(model->body->ptr(1), model->body->named_children()["bn"]);
  EXPECT_TRUE(torch::allclose(model->forward(x), want, 1e-5, 1e-6));
  model->eval();
  EXPECT_FALSE(model->list->ptr(1)->is_training());
}

}  // namespace
}  // namespace apex::parallel
