// SPDX-License-Identifier: BSD-3-Clause
// Trains a small network on handwritten digits, on one process or on many:
//
//     ./mnist
//     torchrun --no-python --nproc_per_node=2 ./mnist
//     srun -n 8 ./mnist                                  (or mpirun)
//
// What turns the one-process program into a distributed one is marked DISTRIBUTED. Every rank takes
// its own slice of the same global batches, so the losses are those of a one-process run up to
// rounding, whatever the number of ranks.

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <apex/parallel.h>

#include "../arguments.h"
#include "digits.h"

namespace {

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
  int epochs = 15;
  int64_t batch_size = 64;  // over all ranks together
  double lr = 0.1;
  double gamma = 0.9;              // on the learning rate after every epoch
  std::string precision = "fp32";  // or bf16, fp16
  std::string data;                // default: digits.bin beside the program
  std::string save;                // a checkpoint is written here after every epoch
  std::string resume;              // and read from here
  int64_t seed = 1;
};

Arguments parse(int argc, char** argv) {
  Arguments args;
  args.data = (std::filesystem::path(argv[0]).parent_path() / "digits.bin").string();
  examples::Options options("Trains a small network on handwritten digits.");
  options.integer("epochs", args.epochs, 1, "epochs in all");
  options.integer("batch-size", args.batch_size, int64_t{1}, "samples per step, over all ranks");
  options.positive("lr", args.lr, "learning rate of the first epoch");
  options.choice("precision", args.precision, {"fp32", "bf16", "fp16"}, "of the forward pass");
  options.input_file("data", args.data, "the digits (default: digits.bin beside the program)");
  options.output_file("save", args.save, "write a checkpoint here after every epoch");
  options.input_file("resume", args.resume, "continue from this checkpoint");
  options.integer("seed", args.seed, int64_t{0}, "of weights and order");
  options.parse(argc, argv);
  return args;
}

/// Forward in the precision that was asked for; backward follows it.
apex::amp::AutocastGuard autocast(const Arguments& args, torch::DeviceType device) {
  return apex::amp::AutocastGuard(device,
                                  args.precision == "fp16" ? torch::kHalf : torch::kBFloat16,
                                  /*enabled=*/args.precision != "fp32");
}

/// Where this process stands among all of the run.
struct Job {
  int rank = 0;
  int world_size = 1;
  torch::Device device = torch::kCPU;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

Job start_job() {
  Job job;
  const bool gpu = torch::cuda::is_available();
  if (gpu) job.device = torch::Device(torch::kCUDA, 0);
  // DISTRIBUTED: a launcher sets rank and world size in the environment; without one, train alone.
  apex::distributed::ProcessGroupOptions options;
  if (!apex::distributed::read_launch_ranks()) {
    // A file in memory, gone with the process however it ends.
    const int file = ::memfd_create("apex_mnist", 0);
    options.init_method("file:///proc/self/fd/" + std::to_string(file));
    options.rank(0);
    options.world_size(1);
  }
  job.group = apex::distributed::init_process_group(gpu ? "nccl" : "gloo", options);
  job.rank = apex::distributed::rank();
  job.world_size = apex::distributed::world_size();
  if (gpu) {
    job.device = torch::Device(
        torch::kCUDA, apex::distributed::choose_gpu(apex::distributed::local_rank(),
                                                    static_cast<int>(torch::cuda::device_count())));
  }
  return job;
}

/// This rank's part of the rows of `x`; the parts of all ranks are `x`.
torch::Tensor slice(const torch::Tensor& x, const Job& job) {
  return x.tensor_split(job.world_size)[job.rank];
}

void sum_over_ranks(torch::Tensor& x, const Job& job) {
  std::vector<torch::Tensor> tensors{x};
  job.group->allreduce(tensors)->wait();
}

/// The share of the test samples that is classified right. Each is looked at by one rank.
double accuracy(DistributedDataParallel<Net>& model, const Split& test, const Arguments& args,
                const Job& job) {
  torch::NoGradGuard no_grad;
  model.eval();
  const auto guard = autocast(args, job.device.type());
  const auto right = model.forward(slice(test.images, job)).argmax(1) == slice(test.labels, job);
  auto counts = torch::stack({right.sum(), torch::tensor(right.numel(), right.sum().options())});
  sum_over_ranks(counts, job);  // DISTRIBUTED
  if (counts[1].item<int64_t>() != test.labels.size(0)) {
    throw std::runtime_error("some test samples were not counted once");
  }
  return counts[0].item<double>() / counts[1].item<double>();
}

/// What a run must have as it was, to be continued.
std::string settings(const Arguments& args) {
  std::ostringstream text;
  text << "--batch-size=" << args.batch_size << " --lr=" << args.lr
       << " --precision=" << args.precision << " --seed=" << args.seed;
  return text.str();
}

/// Writes the file whole or not at all: an interrupted write leaves the checkpoint of before.
void save(const Arguments& args, int epoch, const Net& net, const torch::optim::SGD& optimizer,
          const apex::amp::LossScaler& scaler) {
  torch::serialize::OutputArchive archive, model, state;
  net->save(model);
  optimizer.save(state);
  archive.write("model", model);
  archive.write("optimizer", state);
  archive.write("settings", c10::IValue(settings(args)));
  archive.write("epoch", torch::tensor(epoch));
  archive.write("scale", torch::tensor(scaler.get_scale(), torch::kFloat64));
  archive.write("growth_tracker", torch::tensor(scaler.growth_tracker()));
  // In memory first: the archive's own file ends the program where the disk is full.
  std::ostringstream bytes;
  archive.save_to(bytes);
  // rename() would replace a link itself.
  const std::string target = std::filesystem::weakly_canonical(args.save).string();
  const std::string unfinished = target + ".part";
  std::ofstream file(unfinished, std::ios::binary);
  file << bytes.str();
  file.close();
  std::error_code failed;
  if (file) std::filesystem::rename(unfinished, target, failed);
  if (!file || failed) {
    std::filesystem::remove(unfinished, failed);
    throw std::runtime_error("cannot write the checkpoint " + args.save +
                             ": is there room on the disk?");
  }
}

/// libtorch loads tensors of any shape: what then fails is the next step.
void check_shapes(const Net& net, const torch::optim::SGD& optimizer) {
  const Net expected;
  const auto wanted = expected->parameters(), loaded = net->parameters();
  for (size_t i = 0; i < wanted.size(); ++i) {
    TORCH_CHECK(loaded[i].sizes() == wanted[i].sizes(), "another shape");
    const auto state = optimizer.state().find(loaded[i].unsafeGetTensorImpl());
    if (state == optimizer.state().end()) continue;
    const auto& momentum =
        static_cast<const torch::optim::SGDParamState&>(*state->second).momentum_buffer();
    TORCH_CHECK(!momentum.defined() || momentum.sizes() == wanted[i].sizes(), "another shape");
  }
}

/// Returns the number of epochs that are done. Every rank must be able to read the file.
int load(const Arguments& args, Net& net, torch::optim::SGD& optimizer,
         apex::amp::LossScaler& scaler, const Job& job) {
  torch::serialize::InputArchive archive, model, state;
  torch::Tensor epoch, scale, growth_tracker;
  c10::IValue before;
  try {
    archive.load_from(args.resume, job.device);
    archive.read("settings", before);
    archive.read("model", model);
    archive.read("optimizer", state);
    net->load(model);
    optimizer.load(state);
    check_shapes(net, optimizer);
    archive.read("epoch", epoch);
    archive.read("scale", scale);
    archive.read("growth_tracker", growth_tracker);
  } catch (const c10::Error&) {
    throw std::runtime_error(args.resume +
                             " is not a whole checkpoint of this program: resume from another one");
  }
  if (before.toStringRef() != settings(args)) {
    throw examples::UsageError(args.resume + " was trained with " + before.toStringRef() +
                               ", not " + settings(args) + ": pass the same to continue that run");
  }
  scaler.set_scale(scale.item<double>());
  scaler.set_growth_tracker(growth_tracker.item<int64_t>());
  return epoch.item<int>();
}

/// Trains on every sample once; returns the mean loss.
double train_epoch(DistributedDataParallel<Net>& model, torch::optim::SGD& optimizer,
                   apex::amp::LossScaler& scaler, const Split& train, const Arguments& args,
                   int epoch, const Job& job) {
  model.train();
  // The same order on every rank, and whether or not this process trained the epochs before.
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(args.seed + epoch);
  const int64_t count = train.labels.size(0);
  const auto order = torch::randperm(count, generator, torch::kInt64).to(job.device);
  auto total = torch::zeros({1}, torch::dtype(torch::kFloat64).device(job.device));
  for (const auto& batch : order.split(args.batch_size)) {
    const auto samples = slice(batch, job);  // DISTRIBUTED
    optimizer.zero_grad();
    torch::Tensor output;
    {
      const auto guard = autocast(args, job.device.type());
      output = model.forward(train.images.index_select(0, samples));
    }
    const auto loss_sum = torch::nn::functional::cross_entropy(
        output.to(torch::kFloat32), train.labels.index_select(0, samples),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    // DISTRIBUTED: gradients are averaged over ranks, so these add up to the mean over the batch.
    const auto loss = loss_sum * (static_cast<double>(job.world_size) / batch.size(0));
    scaler.scale(loss).backward();
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
    scaler.unscale_(gradients);  // the same on every rank: they were averaged in backward
    if (!scaler.overflowed()) optimizer.step();
    scaler.update();
    total += loss_sum.detach();
  }
  sum_over_ranks(total, job);  // DISTRIBUTED
  return total.item<double>() / count;
}

/// DISTRIBUTED: whether the parameters of all ranks are the same, bit for bit.
bool ranks_agree(const Net& net, const Job& job) {
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
  const auto mine = torch::cat(flat).view(torch::kInt32);
  std::vector<torch::Tensor> first{mine.clone()};
  job.group->broadcast(first)->wait();
  auto differing = (mine != first[0]).sum().view({1});
  sum_over_ranks(differing, job);
  return differing.item<int64_t>() == 0;
}

void run(const Arguments& args) {
  const Job job = start_job();
  if (args.batch_size < job.world_size) {
    throw examples::UsageError("--batch-size " + std::to_string(args.batch_size) +
                               " leaves some of the " + std::to_string(job.world_size) +
                               " ranks without samples: raise it");
  }
  const Digits digits = read_digits(args.data);
  const Split train = digits.train.to(job.device), test = digits.test.to(job.device);

  torch::manual_seed(args.seed);
  Net net;
  net->to(job.device);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(args.lr).momentum(0.9));
  apex::amp::LossScalerOptions scaling;
  scaling.dynamic(args.precision == "fp16");  // only fp16 has gradients that underflow
  if (!scaling.dynamic()) scaling.init_scale(1.0);
  apex::amp::LossScaler scaler(scaling);
  const int done = args.resume.empty() ? 0 : load(args, net, optimizer, scaler, job);

  DistributedDataParallel model(net);  // DISTRIBUTED
  double right = accuracy(model, test, args, job);
  for (int epoch = done + 1; epoch <= args.epochs; ++epoch) {
    static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options())
        .lr(args.lr * std::pow(args.gamma, epoch - 1));
    const double loss = train_epoch(model, optimizer, scaler, train, args, epoch, job);
    right = accuracy(model, test, args, job);
    if (job.rank == 0) {
      std::printf("epoch %d: loss %.6f, test accuracy %.2f %%\n", epoch, loss, 100 * right);
      std::fflush(stdout);
      if (!args.save.empty()) save(args, epoch, net, optimizer, scaler);
    }
  }
  const bool equal = ranks_agree(net, job);
  if (job.rank == 0) {
    std::printf("final: test accuracy %.2f %%, %d ranks, %s, parameters %s\n", 100 * right,
                job.world_size, args.precision.c_str(), equal ? "bitwise equal" : "DIFFER");
  }
  apex::distributed::destroy_process_group();
  if (!equal) throw std::runtime_error("the ranks ended with different parameters");
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("mnist", [&] { run(parse(argc, argv)); });
}
