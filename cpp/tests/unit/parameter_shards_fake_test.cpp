// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/parameter_shards.h>
#include <support/fake_device.h>
#include <support/fake_group.h>

// ParameterShards on a device, whose collectives are only enqueued: the host must not wait, and a
// collective that is aborted must leave the parameters from before the step.

namespace apex::testing {
namespace {

using parallel::NamedTensor;
using parallel::ParameterPiece;
using parallel::ParameterShards;
using Strings = std::vector<std::string>;

struct Sharded {
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::vector<NamedTensor> parameters;
  std::unique_ptr<ParameterShards> shards;

  Sharded() {
    fake::MirrorRules rules;
    rules.aborted = aborted;
    group = fake::make_mirror_group(2, "wire", rules);
    for (const int64_t numel : {10000, 7, 3000}) {
      const at::Tensor values = at::arange(numel, at::kFloat);
      parameters.push_back({std::to_string(numel), values.to(fake::device())});
    }
    shards = std::make_unique<ParameterShards>(parameters, group, std::vector<double>{},
                                               parallel::Cut::kEach);
  }

  /// Adds one to this rank's pieces.
  void step() {
    shards->take_gradients();
    for (const at::Tensor& tensor : shards->tensors()) tensor.add_(1);
    shards->drop_gradients();
  }

  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const NamedTensor& one : parameters) all.push_back(fake::peek(one.tensor).clone());
    return all;
  }
};

bool same(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  for (size_t i = 0; i < left.size(); ++i) {
    if (!left[i].equal(right[i])) return false;
  }
  return true;
}

TEST(ParameterShardsFake, Publish_TakesWhatOthersSendAndTheHostDoesNotWait) {
  fake::detector().reset();
  Sharded sharded;
  const size_t waits = fake::detector().host_waits().size();
  sharded.step();
  sharded.shards->publish();
  EXPECT_EQ(fake::detector().host_waits().size(), waits);
  EXPECT_EQ(fake::detector().errors(), Strings{});
  // The other rank mirrors this one: the bytes of its pieces are the first ones of this rank's.
  const ParameterPiece first = sharded.shards->shards()[0].front();
  const ParameterPiece others = sharded.shards->shards()[1].front();
  const std::vector<at::Tensor> now = sharded.values();
  EXPECT_EQ(now[first.parameter][first.begin].item<float>(), static_cast<float>(first.begin) + 1);
  EXPECT_EQ(now[others.parameter][others.begin].item<float>(), 1);
}

TEST(ParameterShardsFake, PublishThatIsAborted_KeepsTheParametersFromBefore) {
  fake::detector().reset();
  Sharded sharded;
  sharded.step();
  sharded.shards->publish();
  // What the aborted collectives deliver, that of this step, must not be taken.
  for (const NamedTensor& one : sharded.parameters) one.tensor.mul_(2);
  const std::vector<at::Tensor> before = sharded.values();
  *sharded.aborted = true;
  for (int times = 0; times < 2; ++times) {  // also the steps that are enqueued behind it
    sharded.step();
    EXPECT_FALSE(same(sharded.values(), before));
    sharded.shards->publish();
    EXPECT_TRUE(same(sharded.values(), before));
  }
  *sharded.aborted = false;
  sharded.step();
  sharded.shards->publish();
  EXPECT_FALSE(same(sharded.values(), before));
  EXPECT_EQ(fake::detector().errors(), Strings{});
}

TEST(ParameterShardsFake, GiveUp_RestoresWhatWasStepped) {
  fake::detector().reset();
  Sharded sharded;
  const std::vector<at::Tensor> before = sharded.values();
  sharded.step();
  sharded.shards->give_up("a test");
  EXPECT_TRUE(same(sharded.values(), before));
}

}  // namespace
}  // namespace apex::testing
