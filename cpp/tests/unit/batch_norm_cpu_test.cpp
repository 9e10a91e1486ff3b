// The CPU kernels of every instruction set that this machine has, against a wider type.
//
// Inputs are new in every run; a failure prints the seed, and APEX_TEST_SEED repeats it.

#include <ATen/Version.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/batch_norm_cpu_variants.h"

namespace apex::kernels {
namespace {

/// Those torch would use here, or any below.
std::vector<const CpuVariant*> usable_variants() {
  std::vector<const CpuVariant*> variants{&cpu_variant_default()};
#if defined(APEX_CPU_VARIANTS_X86)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX2" || capability == "AVX512") {
    variants.push_back(&cpu_variant_avx2());
  }
  if (capability == "AVX512") {
    variants.push_back(&cpu_variant_avx512());
  }
#endif
  return variants;
}

template <typename T>
const CpuKernels<T>& kernels_of(const CpuVariant& variant);
template <>
const CpuKernels<float>& kernels_of<float>(const CpuVariant& v) { return *v.float32; }
template <>
const CpuKernels<double>& kernels_of<double>(const CpuVariant& v) { return *v.float64; }
template <>
const CpuKernels<at::Half>& kernels_of<at::Half>(const CpuVariant& v) { return *v.float16; }
template <>
const CpuKernels<at::BFloat16>& kernels_of<at::BFloat16>(const CpuVariant& v) {
  return *v.bfloat16;
}

uint64_t seed() {
  const char* given = std::getenv("APEX_TEST_SEED");
  return given != nullptr ? std::stoull(given) : std::random_device{}();
}

/// Mean and squared deviations of `count` values, `stride` apart, by two passes.
template <typename T>
Welford<long double> two_pass(const std::vector<const T*>& runs, int64_t length, int64_t stride) {
  Welford<long double> all;
  all.count = static_cast<long double>(runs.size()) * length;
  for (const T* run : runs) {
    for (int64_t i = 0; i < length; ++i) {
      all.mean += static_cast<double>(run[i * stride]) / all.count;
    }
  }
  for (const T* run : runs) {
    for (int64_t i = 0; i < length; ++i) {
      const long double deviation = static_cast<double>(run[i * stride]) - all.mean;
      all.m2 += deviation * deviation;
    }
  }
  return all;
}

template <typename T>
class BatchNormCpu : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure()) {
      std::cerr << "repeat with APEX_TEST_SEED=" << seed_ << std::endl;
    }
  }

  using Acc = typename CpuKernels<T>::Acc;
  // Large against the deviation, yet more than one value of T within it.
  static constexpr double kLargeMean =
      std::is_same_v<T, at::BFloat16> ? 100 : std::is_same_v<T, at::Half> ? 1000 : 1e4;
  static constexpr double kRounding = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  // The narrowest pack: two vectors of 32 bytes.
  static constexpr int64_t kWidth = 64 / static_cast<int64_t>(sizeof(Acc));

  /// What batch_norm_cpu.h promises of statistics whose lanes add up at most `additions` terms.
  static void expect_statistics(const Welford<double>& got, const Welford<long double>& want,
                                int64_t additions, int64_t merges, const std::string& what) {
    const double mean = static_cast<double>(want.mean);
    const double variance = static_cast<double>(want.m2 / want.count);
    const double bound =
        variance_error(additions, kRounding, merges, variance, std::fabs(mean));
    EXPECT_NEAR(got.m2 / got.count, variance, bound) << what;
    // Where every value is the same, the sum is exact, and so is the mean.
    EXPECT_NEAR(got.mean, mean, variance > 0 ? bound / std::sqrt(variance) : 0) << what;
  }

  std::vector<T> random_values(int64_t count, double mean) {
    std::normal_distribution<double> normal(mean, 1.0);
    std::vector<T> values(count);
    for (T& v : values) {
      v = static_cast<T>(static_cast<float>(normal(random_)));
    }
    return values;
  }
  const uint64_t seed_ = seed();
  std::mt19937_64 random_{seed_};
};

using ElementTypes = ::testing::Types<float, double, at::Half, at::BFloat16>;
TYPED_TEST_SUITE(BatchNormCpu, ElementTypes);

TYPED_TEST(BatchNormCpu, PlanesStatistics_AnyLength_StayWithinTheBound) {
  using T = TypeParam;
  for (const CpuVariant* variant : usable_variants()) {
    for (const int64_t plane : {1, 2, 15, 16, 17, 31, 32, 33, 49, 64, 97, 4096, 4100, 9000}) {
      const Planes sizes{3, 2, plane};
      const auto x = this->random_values(6 * plane, this->kLargeMean);
      std::vector<const T*> runs;
      for (int64_t n = 0; n < 3; ++n) {
        runs.push_back(x.data() + (n * 2 + 1) * plane);
      }
      const Welford<double> got = kernels_of<T>(*variant).planes_statistics(x.data(), sizes, 1);
      EXPECT_EQ(got.count, 3 * plane);
      const int64_t packs = (std::min<int64_t>(plane, 4096) + this->kWidth - 1) / this->kWidth;
      this->expect_statistics(got, two_pass<T>(runs, plane, 1), plane < 4096 ? 3 * packs : packs, 9,
                              std::string(variant->name) + " " + std::to_string(plane));
    }
  }
}

TYPED_TEST(BatchNormCpu, RowsStatistics_AnyWidthAndParts_StayWithinTheBound) {
  using T = TypeParam;
  for (const CpuVariant* variant : usable_variants()) {
    for (const int64_t channels : {1, 3, 8, 15, 16, 17, 32, 33, 70}) {
      const int64_t rows = 701;
      const auto x = this->random_values(rows * channels, -this->kLargeMean);
      std::vector<double> mean(channels), m2(channels);
      const auto& kernels = kernels_of<T>(*variant);
      kernels.rows_statistics(x.data(), 0, 370, channels, mean.data(), m2.data(), 0);
      kernels.rows_statistics(x.data(), 370, rows, channels, mean.data(), m2.data(), 370);
      for (int64_t c = 0; c < channels; ++c) {
        this->expect_statistics({mean[c], m2[c], static_cast<double>(rows)},
                                two_pass<T>({x.data() + c}, rows, channels), 128, 9,
                                std::string(variant->name) + " " + std::to_string(channels));
      }
    }
  }
}

TYPED_TEST(BatchNormCpu, PlanesNormalize_Neighbours_AreLeftAlone) {
  using T = TypeParam;
  using Acc = typename CpuKernels<T>::Acc;
  for (const CpuVariant* variant : usable_variants()) {
    for (const int64_t plane : {1, 7, 16, 33, 49}) {
      const Planes sizes{2, 3, plane};
      const auto x = this->random_values(6 * plane, 0);
      std::vector<T> y(x.size(), static_cast<T>(77.0f));
      kernels_of<T>(*variant).planes_normalize(x.data(), nullptr, y.data(), sizes, 1,
                                               {Acc(0.5), Acc(2), Acc(1)}, true);
      for (size_t i = 0; i < x.size(); ++i) {
        const bool written = static_cast<int64_t>(i) / plane % 3 == 1;
        const double want =
            written ? std::max(0.0, (static_cast<double>(x[i]) - 0.5) * 2 + 1) : 77.0;
        EXPECT_NEAR(static_cast<double>(y[i]), want, 0.01 * std::fabs(want) + 1e-6)
            << variant->name << " " << plane << " " << i;
      }
    }
  }
}

TYPED_TEST(BatchNormCpu, PlanesReduce_AnyLength_StaysWithinTheBound) {
  using T = TypeParam;
  using Acc = typename CpuKernels<T>::Acc;
  for (const CpuVariant* variant : usable_variants()) {
    for (const int64_t plane : {1, 15, 33, 49, 5000}) {
      const Planes sizes{2, 2, plane};
      const auto x = this->random_values(4 * plane, 3);
      const auto dy = this->random_values(4 * plane, 0.5);
      const NormalizeCoefficients<Acc> k{Acc(3), Acc(1), Acc(0.25)};
      double sum = 0, dot = 0, sum_size = 0, dot_size = 0;
      for (int64_t n = 0; n < 2; ++n) {
        for (int64_t s = 0; s < plane; ++s) {
          const int64_t i = n * 2 * plane + s;
          const double centered = static_cast<double>(x[i]) - 3;
          if (static_cast<Acc>(centered) + Acc(0.25) > Acc(0)) {
            sum += static_cast<double>(dy[i]);
            dot += static_cast<double>(dy[i]) * centered;
            sum_size += std::fabs(static_cast<double>(dy[i]));
            dot_size += std::fabs(static_cast<double>(dy[i]) * centered);
          }
        }
      }
      const ReduceResult got = kernels_of<T>(*variant).planes_reduce(
          dy.data(), x.data(), nullptr, sizes, 0, k, ReluMask::kRecompute);
      // Each lane adds up rounded products of rounded deviations, at most 4096 elements' worth.
      const int64_t packs = (std::min<int64_t>(plane, 4096) + this->kWidth - 1) / this->kWidth;
      const double bound = static_cast<double>((plane < 4096 ? 2 * packs : packs) + 3) *
                               this->kRounding + 1e-15 * static_cast<double>(plane);
      EXPECT_NEAR(got.sum_dy, sum, bound * sum_size) << variant->name << " " << plane;
      EXPECT_NEAR(got.sum_dy_xmu, dot, bound * dot_size) << variant->name << " " << plane;
    }
  }
}

}  // namespace
}  // namespace apex::kernels
