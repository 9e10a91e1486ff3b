// SPDX-License-Identifier: BSD-3-Clause
// Step 1: one process, libtorch alone.
//
//     ./step1_one_process --csv=one.csv

#include <vector>

#include <torch/torch.h>

#include "common.h"

namespace {

void train(const tutorial::Arguments& args) {
  const Digits digits = read_digits(args.data);
  torch::manual_seed(1);
  torch::nn::Sequential net = tutorial::make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  tutorial::Report report(args, /*speaks=*/true);
  for (int64_t epoch = 1; epoch <= args.epochs; ++epoch) {
    net->train();
    std::vector<torch::Tensor> losses;
    const auto batches = torch::randperm(digits.train.labels.size(0)).split(64);
    for (const torch::Tensor& batch : batches) {
      optimizer.zero_grad();
      const auto output = net->forward(digits.train.images.index_select(0, batch));
      const auto loss =
          torch::nn::functional::cross_entropy(output, digits.train.labels.index_select(0, batch));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.detach());
      report.progress(epoch, static_cast<int64_t>(losses.size()),
                      static_cast<int64_t>(batches.size()));
    }

    net->eval();
    const torch::NoGradGuard no_grad;
    const auto right = net->forward(digits.test.images).argmax(1) == digits.test.labels;
    report.epoch(epoch, torch::stack(losses), right.to(torch::kFloat64).mean().item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tutorial::run(argc, argv, train, "Step 1: one process, libtorch alone.");
}
