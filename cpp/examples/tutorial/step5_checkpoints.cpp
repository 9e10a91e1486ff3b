// SPDX-License-Identifier: BSD-3-Clause
// Step 5: a sampler for each rank, and a checkpoint after every epoch, from which a run goes on
// that was stopped: on one node, or on two.
//
//     torchrun --no-python --nproc_per_node=2 ./step5_checkpoints --checkpoint=run.ckpt

#include <string>
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
  apex::amp::LossScaler scaler;
  const auto mine = [](const torch::Tensor& rows) {
    return rows.tensor_split(dist::world_size())[static_cast<size_t>(dist::rank())];
  };
  torch::data::samplers::DistributedRandomSampler sampler(  // NEW
      static_cast<size_t>(digits.train.labels.size(0)), static_cast<size_t>(dist::world_size()),
      static_cast<size_t>(dist::rank()));

  apex::parallel::Checkpoint checkpoint(net);  // NEW
  checkpoint.optimizer(optimizer).scaler(scaler).sampler(sampler);
  int64_t epoch = 0;
  if (!args.checkpoint.empty()) epoch = checkpoint.resume(args.checkpoint);
  if (epoch > 0) dist::log_once("going on after epoch " + std::to_string(epoch));

  tutorial::Report report(args, /*speaks=*/dist::rank() == 0, /*appends=*/epoch > 0);
  while (++epoch <= args.epochs) {
    net.train();
    std::vector<torch::Tensor> losses;
    const int64_t steps = (digits.train.labels.size(0) / dist::world_size() + 31) / 32;
    sampler.set_epoch(static_cast<size_t>(epoch));  // NEW: another order
    sampler.reset();
    while (const auto batch = sampler.next(32)) {  // NEW: of this rank
      optimizer.zero_grad();
      const auto rows = torch::tensor(std::vector<int64_t>(batch->begin(), batch->end()));
      torch::Tensor output;
      {
        const apex::amp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
        output = net.forward(digits.train.images.index_select(0, rows));
      }
      const auto loss = torch::nn::functional::cross_entropy(
          output.to(torch::kFloat32), digits.train.labels.index_select(0, rows));
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);  // clipping needs the unscaled gradients
      torch::nn::utils::clip_grad_norm_(net.parameters(), /*max_norm=*/5.0);
      scaler.step(optimizer);  // not if a gradient overflowed
      scaler.update();
      losses.push_back(loss.detach() / dist::world_size());
      report.progress(epoch, static_cast<int64_t>(losses.size()), steps);
    }

    net.eval();
    const torch::NoGradGuard no_grad;
    const auto right = net.forward(mine(digits.test.images)).argmax(1) == mine(digits.test.labels);
    const auto sums = torch::stack(losses).to(torch::kFloat64);
    const auto count = right.sum().to(torch::kFloat64);
    dist::all_reduce(sums);
    dist::all_reduce(count);
    report.epoch(epoch, sums, count.item<double>() / digits.test.labels.size(0));
    if (!args.checkpoint.empty()) checkpoint.save(args.checkpoint, epoch);  // NEW
  }
  dist::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  return tutorial::run(argc, argv, train, "Step 5: a sampler for each rank, and checkpoints.",
                       /*checkpoints=*/true);
}
