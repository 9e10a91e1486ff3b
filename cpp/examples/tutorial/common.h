// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Code unrelated to distributed training: arguments, the network, the output.

#include <cstdint>
#include <fstream>
#include <string>

#include <torch/torch.h>

#include "digits.h"

namespace tutorial {

struct Arguments {
  std::string data;        // default: digits.bin beside the program
  std::string csv;         // the loss of every step is written here, if anywhere
  std::string checkpoint;  // step 5
  int epochs = 4;
};

/// A convolutional network for images [N, 1, 8, 8], with batch norm.
torch::nn::Sequential make_net();

/// A progress line on a terminal, a line for each epoch, and the file of losses.
class Report {
 public:
  /// `speaks`: false on the ranks that print nothing.
  Report(const Arguments& args, bool speaks, bool appends = false);

  /// Step `step` of `steps` of an epoch is done.
  void progress(int64_t epoch, int64_t step, int64_t steps) const;
  /// The losses of its steps, and the share of the test images that is classified right.
  void epoch(int64_t epoch, const torch::Tensor& losses, double accuracy);

 private:
  bool speaks_;
  std::ofstream csv_;
};

/// Reads the command line and calls `train`. An exception is one line, and exit status 1, or 2 if
/// the command line or the environment is wrong.
///
/// `purpose`: the text of --help. `checkpoints`: whether there is an option --checkpoint.
int run(int argc, char** argv, void (*train)(const Arguments&), const char* purpose,
        bool checkpoints = false);

}  // namespace tutorial
