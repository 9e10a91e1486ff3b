// SPDX-License-Identifier: BSD-3-Clause
// Trains a small network on images of digits, on one process or on many:
//
//     ./mnist
//     torchrun --no-python --nproc_per_node=2 ./mnist --epochs=15 --save=run.ckpt
//     srun -n 8 ./mnist                                  (or mpirun)
//
// What turns the one-process program into a distributed one is marked DISTRIBUTED. Every rank takes
// its own slice of the same global batches, so the losses are those of a one-process run up to
// rounding, for any number of ranks.

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <apex/parallel.h>

#include "digits.h"

namespace {

namespace dist = apex::distributed;
using apex::parallel::DistributedDataParallel;

/// Two convolutions and two linear layers, for images [N, 1, 8, 8].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(conv(1, 32)));
    conv2 = register_module("conv2", torch::nn::Conv2d(conv(32, 64).stride(2)));
    fc1 = register_module("fc1", torch::nn::Linear(64 * 4 * 4, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::gelu(conv1(x));
    x = torch::gelu(conv2(x));
    x = torch::gelu(fc1(x.flatten(1)));
    return fc2(x);
  }

  static torch::nn::Conv2dOptions conv(int64_t in, int64_t out) {
    return torch::nn::Conv2dOptions(in, out, 3).padding(1);
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

struct Arguments {
  int64_t epochs = 15;
  int64_t batch_size = 64;  // over all ranks together
  double lr = 0.1;
  std::string precision = "fp32";  // or bf16, fp16: of the forward pass
  std::string save;                // a checkpoint: read if it exists, written after every epoch
};

/// Options as --name=value.
Arguments parse(int argc, char** argv) {
  Arguments args;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const size_t sign = option.find('=');
    const std::string name = option.substr(0, sign);
    const std::string value = sign == std::string::npos ? "" : option.substr(sign + 1);
    if (name == "--epochs") {
      args.epochs = std::stoll(value);
    } else if (name == "--batch-size") {
      args.batch_size = std::stoll(value);
    } else if (name == "--lr") {
      args.lr = std::stod(value);
    } else if (name == "--precision") {
      args.precision = value;
    } else if (name == "--save") {
      args.save = value;
    } else {
      throw std::runtime_error(
          "the options are --epochs=N, --batch-size=N, --lr=X, "
          "--precision=fp32, bf16 or fp16, and --save=FILE");
    }
  }
  return args;
}

/// Joins the job; returns this process's device.
torch::Device start_job() {
  const bool gpu = torch::cuda::is_available();
  // DISTRIBUTED: a launcher sets rank and world size in the environment; without one, train alone.
  dist::ProcessGroupOptions options;
  if (!dist::is_launched()) {
    options.init_method("tcp://127.0.0.1:0");  // any free port
    options.rank(0);
    options.world_size(1);
  }
  dist::init_process_group(gpu ? "nccl" : "gloo", options);
  return gpu ? torch::kCUDA : torch::kCPU;  // this process's GPU
}

/// DISTRIBUTED: this rank's part of the rows of `x`; the parts of all ranks are `x`.
torch::Tensor part_of(const torch::Tensor& x) {
  return x.tensor_split(dist::world_size())[static_cast<size_t>(dist::rank())];
}

apex::amp::AutocastGuard autocast(const Arguments& args, torch::Device device) {
  return apex::amp::AutocastGuard(device.type(),
                                  args.precision == "fp16" ? torch::kHalf : torch::kBFloat16,
                                  /*enabled=*/args.precision != "fp32");
}

/// The share of the test samples that is classified correctly. Each is on one rank.
double accuracy(DistributedDataParallel<Net>& model, const Split& test, const Arguments& args) {
  const torch::NoGradGuard no_grad;
  model.eval();
  const auto guard = autocast(args, test.images.device());
  const auto right = model.forward(part_of(test.images)).argmax(1) == part_of(test.labels);
  auto count = right.sum().to(torch::kFloat64);
  dist::all_reduce(count);  // DISTRIBUTED
  return count.item<double>() / test.labels.size(0);
}

/// Trains on every sample once; returns the mean loss.
double train_epoch(DistributedDataParallel<Net>& model, torch::optim::SGD& optimizer,
                   apex::amp::LossScaler& scaler, const Split& train, const Arguments& args,
                   int64_t epoch) {
  model.train();
  // The same order on every rank, whether or not this process trained the epochs before.
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1 + epoch);
  const int64_t count = train.labels.size(0);
  const auto order = torch::randperm(count, generator, torch::kInt64).to(train.labels.device());
  auto total = torch::zeros({1}, torch::dtype(torch::kFloat64).device(order.device()));
  for (const auto& batch : order.split(args.batch_size)) {
    const auto samples = part_of(batch);  // DISTRIBUTED
    optimizer.zero_grad();
    torch::Tensor output;
    {
      const auto guard = autocast(args, order.device());
      output = model.forward(train.images.index_select(0, samples));
    }
    const auto loss_sum = torch::nn::functional::cross_entropy(
        output.to(torch::kFloat32), train.labels.index_select(0, samples),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    // DISTRIBUTED: gradients are averaged over ranks, so these add up to the mean over the batch.
    const auto loss = loss_sum * (static_cast<double>(dist::world_size()) / batch.size(0));
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // not if a gradient overflowed: the same decision on every rank
    scaler.update();
    total += loss_sum.detach();
  }
  dist::all_reduce(total);  // DISTRIBUTED
  return total.item<double>() / count;
}

/// DISTRIBUTED: whether the parameters of all ranks are the same, bit for bit.
bool ranks_agree(const Net& net) {
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
  const auto mine = torch::cat(flat).view(torch::kInt32);
  auto first = mine.clone();
  dist::broadcast(first, 0);
  auto differing = (mine != first).sum().view({1});
  dist::all_reduce(differing);
  return differing.item<int64_t>() == 0;
}

void run(const Arguments& args) {
  const torch::Device device = start_job();
  const Digits digits = draw_digits();
  const Split train = digits.train.to(device), test = digits.test.to(device);

  torch::manual_seed(1);
  Net net;
  net->to(device);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(args.lr).momentum(0.9));
  apex::amp::LossScalerOptions scaling;
  scaling.dynamic(args.precision == "fp16");  // only fp16 has gradients that underflow
  if (!scaling.dynamic()) scaling.init_scale(1.0);
  apex::amp::LossScaler scaler(scaling);
  DistributedDataParallel model(net);  // DISTRIBUTED
  apex::parallel::Checkpoint checkpoint(model);
  checkpoint.optimizer(optimizer).scaler(scaler);
  int64_t epoch = args.save.empty() ? 0 : checkpoint.resume(args.save);

  double right = accuracy(model, test, args);
  while (++epoch <= args.epochs) {
    static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options())
        .lr(args.lr * std::pow(0.9, epoch - 1));
    const double loss = train_epoch(model, optimizer, scaler, train, args, epoch);
    right = accuracy(model, test, args);
    if (dist::rank() == 0) {
      std::printf("epoch %d: loss %.6f, test accuracy %.2f %%\n", static_cast<int>(epoch), loss,
                  100 * right);
      std::fflush(stdout);
    }
    if (!args.save.empty()) checkpoint.save(args.save, epoch);
  }
  const bool equal = ranks_agree(net);
  if (dist::rank() == 0) {
    std::printf("final: test accuracy %.2f %%, %d ranks, %s, parameters %s\n", 100 * right,
                dist::world_size(), args.precision.c_str(), equal ? "bitwise equal" : "DIFFER");
  }
  dist::destroy_process_group();
  if (!equal) throw std::runtime_error("the ranks ended with different parameters");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist: %s\n", error.what());
    return 1;
  }
}
