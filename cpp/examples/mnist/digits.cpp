// SPDX-License-Identifier: BSD-3-Clause
#include "digits.h"

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace {
constexpr int64_t kTrain = 1437;
constexpr int64_t kTest = 360;
constexpr int64_t kPixels = 64;
}  // namespace

Digits read_digits(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path + ": name the data with --data=PATH");
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const int64_t count = kTrain + kTest;
  if (static_cast<int64_t>(bytes.size()) != count * (kPixels + 1)) {
    throw std::runtime_error(path + " is not what make_digits.py writes");
  }
  const auto records = torch::from_blob(bytes.data(), {count, kPixels + 1}, torch::kUInt8);
  const auto images =
      records.narrow(1, 0, kPixels).to(torch::kFloat32).div(16).view({count, 1, 8, 8});
  const auto labels = records.select(1, kPixels).to(torch::kInt64);
  return {{images.narrow(0, 0, kTrain), labels.narrow(0, 0, kTrain)},
          {images.narrow(0, kTrain, kTest), labels.narrow(0, kTrain, kTest)}};
}
