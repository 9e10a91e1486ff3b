// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Declarations for the C++ code blocks in documentation and header comments: names that the
// surrounding text introduces. Blocks are compiled, not linked: python/tests/test_docs_cpp.py.

#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <apex/parallel.h>

namespace given {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::relu(fc1(x))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

extern Net net;
extern apex::parallel::DistributedDataParallel<Net> model;
extern torch::optim::SGD optimizer;
extern apex::parallel::ShardedOptimizer<torch::optim::AdamW> sharded;
extern apex::amp::LossScaler scaler;
extern torch::data::samplers::DistributedRandomSampler sampler;
extern c10::intrusive_ptr<c10d::ProcessGroup> group;
extern torch::nn::Sequential sequential;
extern torch::Device device;
extern int rank;
extern int64_t count, epoch;

extern torch::Tensor x, y, loss, inputs, targets;
/// Inputs and targets.
extern std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target);
void train_one(int64_t step);

}  // namespace given
