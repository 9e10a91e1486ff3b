// SPDX-License-Identifier: BSD-3-Clause
#include "common.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>

#include "../arguments.h"

namespace tutorial {

torch::nn::Sequential make_net() {
  const auto conv = [](int64_t in, int64_t out) {
    return torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false);
  };
  return torch::nn::Sequential(torch::nn::Conv2d(conv(1, 16)), torch::nn::BatchNorm2d(16),
                               torch::nn::ReLU(), torch::nn::Conv2d(conv(16, 32).stride(2)),
                               torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::Flatten(),
                               torch::nn::Linear(32 * 4 * 4, 10));
}

Report::Report(const Arguments& args, bool speaks, bool appends) : speaks_(speaks) {
  if (!speaks || args.csv.empty()) return;
  const bool header = !appends || !std::filesystem::exists(args.csv);
  csv_.open(args.csv, appends ? std::ios::app : std::ios::trunc);
  if (header) csv_ << "loss\n";
  if (!csv_) throw std::runtime_error("cannot write " + args.csv);
}

void Report::progress(int64_t epoch, int64_t step, int64_t steps) const {
  if (!speaks_ || ::isatty(STDOUT_FILENO) == 0) return;
  std::printf("\repoch %lld: %lld of %lld steps", static_cast<long long>(epoch),
              static_cast<long long>(step), static_cast<long long>(steps));
  std::fflush(stdout);
}

void Report::epoch(int64_t epoch, const torch::Tensor& losses, double accuracy) {
  if (!speaks_) return;
  const char* const begin = ::isatty(STDOUT_FILENO) == 0 ? "" : "\r";
  std::printf("%sepoch %lld: loss %.6f, test accuracy %.2f %%\n", begin,
              static_cast<long long>(epoch), losses.mean().item<double>(), 100 * accuracy);
  std::fflush(stdout);
  if (!csv_.is_open()) return;
  for (int64_t i = 0; i < losses.size(0); ++i) csv_ << losses[i].item<double>() << "\n";
  csv_.flush();
  if (!csv_) throw std::runtime_error("cannot write the --csv file: is there room on the disk?");
}

int run(int argc, char** argv, void (*train)(const Arguments&), const char* purpose,
        bool checkpoints) {
  const std::filesystem::path program(argv[0]);
  return examples::run_program(program.filename().c_str(), [&] {
    Arguments args;
    args.data = (program.parent_path() / "digits.bin").string();
    examples::Options options(purpose);
    options.integer("epochs", args.epochs, 1, "epochs in all");
    options.input_file("data", args.data, "the digits (default: digits.bin beside the program)");
    options.output_file("csv", args.csv, "write the loss of every step here");
    if (checkpoints) {
      options.output_file("checkpoint", args.checkpoint,
                          "write a checkpoint here after every epoch, and continue from it");
    }
    options.parse(argc, argv);
    train(args);
  });
}

}  // namespace tutorial
