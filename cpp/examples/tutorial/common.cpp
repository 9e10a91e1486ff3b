// SPDX-License-Identifier: BSD-3-Clause
#include "common.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>

namespace tutorial {

namespace {

int parse_epochs(const std::string& value) {
  size_t used = 0;
  int epochs = 0;
  try {
    epochs = std::stoi(value, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != value.size() || epochs < 1) {
    throw std::invalid_argument("--epochs is a number from 1, not '" + value + "'");
  }
  return epochs;
}

}  // namespace

Arguments parse(int argc, char** argv) {
  Arguments args;
  const std::filesystem::path program(argv[0]);
  args.program = program.filename().string();
  args.data = (program.parent_path() / "digits.bin").string();
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    const std::string name = text.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : text.substr(equals + 1);
    if (name == "--data") {
      args.data = value;
    } else if (name == "--csv") {
      args.csv = value;
    } else if (name == "--checkpoint") {
      args.checkpoint = value;
    } else if (name == "--epochs") {
      args.epochs = parse_epochs(value);
    } else {
      throw std::invalid_argument("unknown argument " + text +
                                  "; there are --epochs=N, --data=FILE, --csv=FILE and, in step 5, "
                                  "--checkpoint=FILE");
    }
  }
  return args;
}

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
}

int run(int argc, char** argv, void (*train)(const Arguments&)) {
  try {
    train(parse(argc, argv));
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", std::filesystem::path(argv[0]).filename().c_str(),
                 error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace tutorial
