// SPDX-License-Identifier: BSD-3-Clause
// Step 4: forward in float16 where that is safe, with a scaled loss; gradients are clipped.
//
//     torchrun --no-python --nproc_per_node=2 ./step4_mixed_precision --csv=four.csv

#include <vector>

#include <torch/torch.h>

#include <apex/parallel.h>

#include "common.h"

namespace {

namespace dist = apex::distributed;

void train(const tutorial::Arguments& args) {
  dist::init_process_group("gloo");
  const Digits digits = read_digits(args.data);
  torch::manual_seed(1);
  torch::nn::Sequential layers = tutorial::make_net();
  apex::parallel::convert_sync_batch_norm(*layers);
  apex::parallel::DistributedDataParallel net(layers);
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  apex::amp::LossScaler scaler;  // NEW
  const auto mine = [](const torch::Tensor& rows) {
    return rows.tensor_split(dist::world_size())[static_cast<size_t>(dist::rank())];
  };

  tutorial::Report report(args, /*speaks=*/dist::rank() == 0);
  for (int64_t epoch = 1; epoch <= args.epochs; ++epoch) {
    net.train();
    std::vector<torch::Tensor> losses;
    const auto batches = torch::randperm(digits.train.labels.size(0)).split(64);
    for (const torch::Tensor& batch : batches) {
      optimizer.zero_grad();
      const auto rows = mine(batch);
      torch::Tensor output;
      {
        const apex::amp::AutocastGuard autocast(torch::kCPU, torch::kHalf);  // NEW
        output = net.forward(digits.train.images.index_select(0, rows));
      }
      const auto sum = torch::nn::functional::cross_entropy(
          output.to(torch::kFloat32), digits.train.labels.index_select(0, rows),
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      // Gradients are averaged over the ranks, so these make the mean over the batch.
      const auto loss = sum * (static_cast<double>(dist::world_size()) / batch.size(0));
      scaler.scale(loss).backward();  // NEW
      scaler.unscale_(optimizer);     // NEW: clipping needs the unscaled gradients
      torch::nn::utils::clip_grad_norm_(net.parameters(), /*max_norm=*/5.0);
      scaler.step(optimizer);  // NEW: not if a gradient overflowed
      scaler.update();         // NEW
      losses.push_back(sum.detach() / batch.size(0));
      report.progress(epoch, static_cast<int64_t>(losses.size()),
                      static_cast<int64_t>(batches.size()));
    }

    net.eval();
    const torch::NoGradGuard no_grad;
    const auto right = net.forward(mine(digits.test.images)).argmax(1) == mine(digits.test.labels);
    const auto sums = torch::stack(losses).to(torch::kFloat64);
    const auto count = right.sum().to(torch::kFloat64);
    dist::all_reduce(sums);  // of the whole batch
    dist::all_reduce(count);
    report.epoch(epoch, sums, count.item<double>() / digits.test.labels.size(0));
  }
  dist::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  return tutorial::run(argc, argv, train, "Step 4: forward in float16, with a scaled loss.");
}
