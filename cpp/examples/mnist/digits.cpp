// SPDX-License-Identifier: BSD-3-Clause
#include "digits.h"

#include <ATen/CPUGeneratorImpl.h>

namespace {
constexpr int64_t kTrain = 1437;
constexpr int64_t kTest = 360;
constexpr int64_t kRows = 7, kColumns = 5, kSide = 8;

constexpr const char* kGlyphs[10] = {
    ".###.#...##..###.#.###..##...#.###.", "..#...##....#....#....#....#...###.",
    ".###.#...#....#...#...#...#...#####", "#####...#...#.....#.....##...#.###.",
    "...#...##..#.#.#..#.#####...#....#.", "######....####.....#....##...#.###.",
    "..##..#...#....####.#...##...#.###.", "#####....#...#...#...#....#....#...",
    ".###.#...##...#.###.#...##...#.###.", ".###.#...##...#.####....#...#..##..",
};
}  // namespace

Digits draw_digits() {
  const int64_t count = kTrain + kTest;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
  const auto labels = torch::randint(10, {count}, generator, torch::kInt64);
  const auto shifts = torch::randint(8, {count}, generator, torch::kInt64);
  // Noise, in which every glyph is somewhere.
  const auto images = torch::randn({count, 1, kSide, kSide}, generator, torch::kFloat32).mul_(0.3);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t shift = shifts[i].item<int64_t>();
    const char* glyph = kGlyphs[labels[i].item<int64_t>()];
    auto* const corner = images[i].data_ptr<float>() + shift / 4 * kSide + shift % 4;
    for (int64_t y = 0; y < kRows; ++y) {
      for (int64_t x = 0; x < kColumns; ++x) corner[y * kSide + x] += *glyph++ == '#' ? 1 : 0;
    }
  }
  return {{images.narrow(0, 0, kTrain), labels.narrow(0, 0, kTrain)},
          {images.narrow(0, kTrain, kTest), labels.narrow(0, kTrain, kTest)}};
}
