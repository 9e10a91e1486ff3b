// SPDX-License-Identifier: BSD-3-Clause
// One rank of a job whose other ranks may be Python programs (python/tests/test_cpp_python_job.py).
// Trains a small model for a few steps in the mode given by the second argument, and writes its
// parameters, as raw float32, to the file given by the first. Modes: sgd, larc, no_sync (SGD with
// two backwards per step and bucket_cap_mb), join (SGD, with two more batches on each further
// rank).

#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

#include <torch/torch.h>

#include <apex/parallel.h>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(6, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

void train(const char* path, const std::string& way) {
  namespace dist = apex::distributed;
  dist::init_process_group("gloo");
  const int rank = dist::rank();
  torch::manual_seed(100 + rank);  // the wrapper must make the ranks equal
  apex::parallel::DistributedDataParallelOptions options;
  if (way == "no_sync") options.bucket_cap_mb(25);
  apex::parallel::DistributedDataParallel model(Net(), options);
  torch::optim::SGD sgd(model.parameters(),
                        torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  apex::parallel::LARC larc(sgd);
  const auto backward = [&](int step) {
    const auto x = torch::sin(torch::arange(48, torch::kFloat32).view({8, 6}) + (10 * step + rank));
    (model.forward(x) - x.slice(1, 0, 3)).square().mean().backward();
  };
  const auto steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      sgd.zero_grad();
      if (way == "no_sync") {
        const auto guard = model.no_sync();
        backward(100 + step);
      }
      backward(step);
      if (way == "larc") {
        larc.step();
      } else {
        sgd.step();
      }
    }
  };
  if (way == "join") {
    const auto guard = model.join();
    steps(4 + 2 * rank);
  } else {
    steps(6);
  }
  std::ofstream file(path, std::ios::binary);
  for (const auto& parameter : model.parameters()) {
    const auto values = parameter.detach().contiguous();
    file.write(static_cast<const char*>(values.data_ptr()),
               static_cast<std::streamsize>(values.nbytes()));
  }
  file.close();
  dist::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw std::invalid_argument("name the file to write and the way to train");
    train(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_rank: %s\n", error.what());
    return 1;
  }
}
