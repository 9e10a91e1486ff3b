// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/types.h>

/// Images [N, 1, 8, 8] float32 and their digits [N] int64.
struct Split {
  torch::Tensor images;
  torch::Tensor labels;

  Split to(torch::Device device) const { return {images.to(device), labels.to(device)}; }
};

struct Digits {
  Split train;  // 1,437
  Split test;   // 360
};

/// Draws digits, shifted and with noise: the same ones in every call.
Digits draw_digits();
