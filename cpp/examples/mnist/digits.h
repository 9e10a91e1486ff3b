// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torch/torch.h>

/// Images [N, 1, 8, 8] float32 of 0..1 and their digits [N] int64.
struct Split {
  torch::Tensor images;
  torch::Tensor labels;

  Split to(torch::Device device) const { return {images.to(device), labels.to(device)}; }
};

struct Digits {
  Split train;  // 1,437
  Split test;   // 360
};

/// Reads the file that make_digits.py writes.
/// @throws std::runtime_error where there is none or it has another size.
Digits read_digits(const std::string& path);
