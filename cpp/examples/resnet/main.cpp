// SPDX-License-Identifier: BSD-3-Clause
// ResNet-50 on synthetic images of ImageNet's shape, with batch norm over all ranks: what a step
// costs, and where to start for a program of your own.
//
//     torchrun --no-python --nproc_per_node=8 ./resnet --batch-size=64 --precision=bf16
//     torchrun --no-python --nproc_per_node=2 ./resnet --batch-size=4 --image-size=64   (on CPUs)

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <apex/parallel.h>

#include "../arguments.h"

namespace {

using apex::parallel::SyncBatchNorm;
using apex::parallel::SyncBatchNormOptions;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

SyncBatchNorm norm(int64_t channels, const Group& group, bool relu) {
  return SyncBatchNorm(SyncBatchNormOptions(channels).process_group(group).fuse_relu(relu));
}

/// K. He et al., "Deep Residual Learning for Image Recognition" (2016), figure 5, right; the stride
/// sits in the 3x3 convolution. Normalization, the shortcut's addition and the ReLU are one
/// operator.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride, const Group& group) {
    const int64_t out = 4 * width;
    conv1 = register_module("conv1", conv(in, width, 1));
    bn1 = register_module("bn1", norm(width, group, true));
    conv2 = register_module("conv2", conv(width, width, 3, stride));
    bn2 = register_module("bn2", norm(width, group, true));
    conv3 = register_module("conv3", conv(width, out, 1));
    bn3 = register_module("bn3", norm(out, group, true));
    if (stride != 1 || in != out) {
      shortcut_conv = register_module("shortcut_conv", conv(in, out, 1, stride));
      shortcut_bn = register_module("shortcut_bn", norm(out, group, false));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto shortcut = shortcut_conv ? shortcut_bn->forward(shortcut_conv->forward(x)) : x;
    auto y = bn1->forward(conv1->forward(x));
    y = bn2->forward(conv2->forward(y));
    y = conv3->forward(y);
    return bn3->forward(y, shortcut.to(y.scalar_type()));
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr}, shortcut_conv{nullptr};
  SyncBatchNorm bn1{nullptr}, bn2{nullptr}, bn3{nullptr}, shortcut_bn{nullptr};
};
TORCH_MODULE(Bottleneck);

/// Images [N, 3, H, W] to 1,000 scores [N, 1000].
struct ResNet50Impl : torch::nn::Module {
  explicit ResNet50Impl(const Group& group) {
    conv1 = register_module("conv1", conv(3, 64, 7, 2));
    bn1 = register_module("bn1", norm(64, group, true));
    blocks = register_module("blocks", torch::nn::Sequential());
    int64_t in = 64;
    const std::vector<int64_t> depths{3, 4, 6, 3};
    for (size_t stage = 0; stage < depths.size(); ++stage) {
      const int64_t width = int64_t{64} << stage;
      for (int64_t block = 0; block < depths[stage]; ++block) {
        blocks->push_back(Bottleneck(in, width, stage > 0 && block == 0 ? 2 : 1, group));
        in = 4 * width;
      }
    }
    fc = register_module("fc", torch::nn::Linear(in, 1000));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(bn1(conv1(x)), 3, 2, 1);
    return fc(blocks->forward(x).mean({2, 3}));
  }

  torch::nn::Conv2d conv1{nullptr};
  SyncBatchNorm bn1{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet50);

struct Arguments {
  int64_t batch_size = 32;  // of each rank
  int64_t image_size = 224;
  int steps = 20;
  std::string precision = "fp32";  // or bf16
};

Arguments parse(int argc, char** argv) {
  Arguments args;
  examples::Options options("Times ResNet-50 on synthetic images.");
  options.integer("batch-size", args.batch_size, int64_t{1}, "images per step of each rank");
  options.integer("image-size", args.image_size, int64_t{1}, "height and width in pixels");
  options.integer("steps", args.steps, 1,
                  "of which the first three are not timed if there are six");
  options.choice("precision", args.precision, {"fp32", "bf16"}, "of the forward pass");
  options.parse(argc, argv);
  return args;
}

torch::Tensor scores(apex::parallel::DistributedDataParallel<ResNet50>& model,
                     const torch::Tensor& images, const Arguments& args) {
  const apex::amp::AutocastGuard autocast(images.device().type(), torch::kBFloat16,
                                          /*enabled=*/args.precision == "bf16");
  return model.forward(images).to(torch::kFloat32);
}

void run(const Arguments& args) {
  namespace dist = apex::distributed;
  const bool gpu = torch::cuda::is_available();
  const auto group = dist::init_process_group(gpu ? "nccl" : "gloo");
  torch::Device device = torch::kCPU;
  if (gpu) {
    device = torch::Device(
        torch::kCUDA,
        dist::choose_gpu(dist::local_rank(), static_cast<int>(torch::cuda::device_count())));
  }
  const int rank = dist::rank(), world_size = dist::world_size();

  // Statistics use a separate communicator, so they do not queue behind gradients.
  std::vector<int> all(world_size);
  for (int i = 0; i < world_size; ++i) all[i] = i;
  ResNet50 net(dist::new_group(all));
  net->to(device);
  for (auto& parameter : net->parameters()) {
    if (parameter.dim() == 4) {
      parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
    }
  }
  apex::parallel::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));

  torch::manual_seed(rank);  // each rank has images of its own
  const auto images = torch::randn({args.batch_size, 3, args.image_size, args.image_size}, device)
                          .contiguous(torch::MemoryFormat::ChannelsLast);
  const auto labels =
      torch::randint(1000, {args.batch_size}, torch::dtype(torch::kInt64).device(device));

  const int warm_up = args.steps > 5 ? 3 : 0;
  auto start = std::chrono::steady_clock::now();
  double loss = 0;
  for (int step = 0; step < args.steps; ++step) {
    if (step == warm_up) {
      if (gpu) torch::cuda::synchronize();
      start = std::chrono::steady_clock::now();
    }
    optimizer.zero_grad();
    const auto step_loss =
        torch::nn::functional::cross_entropy(scores(model, images, args), labels);
    step_loss.backward();
    optimizer.step();
    if (step + 1 == args.steps) loss = step_loss.item<double>();
  }
  if (gpu) torch::cuda::synchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (rank == 0) {
    const double seen = static_cast<double>(args.batch_size) * (args.steps - warm_up) * world_size;
    std::printf("final: loss %.4f, %.1f images/s, %d ranks, %s\n", loss, seen / seconds.count(),
                world_size, args.precision.c_str());
  }
  dist::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("resnet", [&] { run(parse(argc, argv)); });
}
