// SPDX-License-Identifier: BSD-3-Clause
// Step 2: the same on several processes. Every rank takes its part of each batch.
//
//     torchrun --no-python --nproc_per_node=2 ./step2_two_processes --csv=two.csv

#include <vector>

#include <torch/torch.h>

#include <apex/parallel.h>  // NEW

#include "common.h"

namespace {

namespace dist = apex::distributed;

void train(const tutorial::Arguments& args) {
  dist::init_process_group("gloo");  // NEW
  const Digits digits = read_digits(args.data);
  torch::manual_seed(1);
  apex::parallel::DistributedDataParallel net(tutorial::make_net());  // NEW
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto mine = [](const torch::Tensor& rows) {  // NEW
    return rows.tensor_split(dist::world_size())[static_cast<size_t>(dist::rank())];
  };

  tutorial::Report report(args, /*speaks=*/dist::rank() == 0);
  for (int64_t epoch = 1; epoch <= args.epochs; ++epoch) {
    net.train();
    std::vector<torch::Tensor> losses;
    const auto batches = torch::randperm(digits.train.labels.size(0)).split(64);
    for (const torch::Tensor& batch : batches) {
      optimizer.zero_grad();
      const auto rows = mine(batch);  // NEW
      const auto output = net.forward(digits.train.images.index_select(0, rows));
      const auto sum = torch::nn::functional::cross_entropy(
          output, digits.train.labels.index_select(0, rows),
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      // NEW: gradients are averaged over the ranks, so these make the mean over the batch.
      const auto loss = sum * (static_cast<double>(dist::world_size()) / batch.size(0));
      loss.backward();
      optimizer.step();
      losses.push_back(sum.detach() / batch.size(0));
      report.progress(epoch, static_cast<int64_t>(losses.size()),
                      static_cast<int64_t>(batches.size()));
    }

    net.eval();
    const torch::NoGradGuard no_grad;
    const auto right = net.forward(mine(digits.test.images)).argmax(1) == mine(digits.test.labels);
    const auto sums = torch::stack(losses).to(torch::kFloat64);
    const auto count = right.sum().to(torch::kFloat64);
    dist::all_reduce(sums);  // NEW: of the whole batch
    dist::all_reduce(count);
    report.epoch(epoch, sums, count.item<double>() / digits.test.labels.size(0));
  }
  dist::destroy_process_group();  // NEW
}

}  // namespace

int main(int argc, char** argv) {
  return tutorial::run(argc, argv, train, "Step 2: the same on several processes.");
}
