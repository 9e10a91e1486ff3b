// SPDX-License-Identifier: BSD-3-Clause
// A convolutional network with batch norm, on two processes:
//
//     torchrun --no-python --nproc_per_node=2 ./tutorial 4 run.ckpt
//
// The arguments are the number of epochs, and a checkpoint to continue from. Lines that an ordinary
// libtorch program lacks are marked NEW.

#include <cstdint>
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include <apex/parallel.h>

#include "digits.h"

namespace dist = apex::distributed;

torch::nn::Sequential make_net() {
  const auto conv = [](int64_t in, int64_t out) {
    return torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false);
  };
  return torch::nn::Sequential(torch::nn::Conv2d(conv(1, 16)), torch::nn::BatchNorm2d(16),
                               torch::nn::ReLU(), torch::nn::Conv2d(conv(16, 32).stride(2)),
                               torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::Flatten(),
                               torch::nn::Linear(32 * 4 * 4, 10));
}

void train(int64_t epochs, const std::string& file) {
  dist::init_process_group("gloo");  // NEW
  const Digits digits = draw_digits();
  torch::manual_seed(1);  // the same on every rank, so that all draw the same batches
  torch::nn::Sequential layers = make_net();
  apex::parallel::convert_sync_batch_norm(*layers);     // NEW: statistics of the whole batch
  apex::parallel::DistributedDataParallel net(layers);  // NEW: averages gradients over the ranks
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  apex::amp::LossScaler scaler;  // NEW: small gradients would be zero in float16
  const auto mine = [](const torch::Tensor& rows) {  // NEW: this rank's part
    return rows.tensor_split(dist::world_size())[static_cast<size_t>(dist::rank())];
  };
  apex::parallel::Checkpoint checkpoint(net);  // NEW
  checkpoint.optimizer(optimizer).scaler(scaler);
  int64_t epoch = file.empty() ? 0 : checkpoint.resume(file);

  while (++epoch <= epochs) {
    net.train();
    torch::manual_seed(static_cast<uint64_t>(epoch));
    auto total = torch::zeros({}, torch::kFloat64);
    for (const auto& batch : torch::randperm(digits.train.labels.size(0)).split(64)) {
      optimizer.zero_grad();
      const auto rows = mine(batch);  // NEW
      torch::Tensor output;
      {
        const apex::amp::AutocastGuard autocast(torch::kCPU, torch::kHalf);  // NEW
        output = net.forward(digits.train.images.index_select(0, rows));
      }
      const auto sum = torch::nn::functional::cross_entropy(
          output.to(torch::kFloat32), digits.train.labels.index_select(0, rows),
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      // NEW: gradients are averaged over the ranks, so these make the mean over the batch.
      const auto loss = sum * (static_cast<double>(dist::world_size()) / batch.size(0));
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);  // clipping needs the unscaled gradients
      torch::nn::utils::clip_grad_norm_(net.parameters(), /*max_norm=*/5.0);
      scaler.step(optimizer);  // not if a gradient overflowed
      scaler.update();
      total += sum.detach();
    }

    net.eval();
    const torch::NoGradGuard no_grad;
    const auto right = net.forward(mine(digits.test.images)).argmax(1) == mine(digits.test.labels);
    auto sums = torch::stack({total, right.sum().to(torch::kFloat64)});
    dist::all_reduce(sums);  // NEW
    if (dist::rank() == 0) {
      std::printf("epoch %d: loss %.6f, test accuracy %.2f %%\n", static_cast<int>(epoch),
                  sums[0].item<double>() / digits.train.labels.size(0),
                  100 * sums[1].item<double>() / digits.test.labels.size(0));
    }
    if (!file.empty()) checkpoint.save(file, epoch);  // NEW
  }
  dist::destroy_process_group();  // NEW
}

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? std::stoll(argv[1]) : 4, argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tutorial: %s\n", error.what());
    return 1;
  }
}
