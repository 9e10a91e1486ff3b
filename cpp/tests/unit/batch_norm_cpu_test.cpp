// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels of every instruction set of this host, compared with a wider type.
//
// Inputs are new in every run; a failure prints the seed, and APEX_TEST_SEED repeats it.

#include <ATen/Version.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/batch_norm_cpu_variants.h"
#include "support/test_seed.h"

namespace apex::kernels {
namespace {

/// The variant that torch would use here, and all lower ones.
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
const CpuKernels<float>& kernels_of<float>(const CpuVariant& v) {
  return *v.float32;
}
template <>
const CpuKernels<double>& kernels_of<double>(const CpuVariant& v) {
  return *v.float64;
}
template <>
const CpuKernels<at::Half>& kernels_of<at::Half>(const CpuVariant& v) {
  return *v.float16;
}
template <>
const CpuKernels<at::BFloat16>& kernels_of<at::BFloat16>(const CpuVariant& v) {
  return *v.bfloat16;
}

/// Memory aligned to a cache line, like that of tensors. Only such results can bypass the caches.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

/// Expects `got` to be `want` rounded to T, after at most a few roundings of values of magnitude
/// `size`.
template <typename T>
void expect_rounded(T got, double want, double size, const std::string& what) {
  using Acc = typename CpuKernels<T>::Acc;
  const double unit = std::is_same_v<T, at::BFloat16> ? 0x1p-8
                      : std::is_same_v<T, at::Half>   ? 0x1p-11
                                                      : 0;
  const double rounding = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  EXPECT_NEAR(static_cast<double>(got), want,
              8 * rounding * size + unit * std::fabs(want) + 1e-7 * unit)
      << what;
}

/// Mean and squared deviations of `count` values, `stride` apart, computed in two passes.
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
  // Large compared to the standard deviation, which still contains more than one value of T.
  static constexpr double kLargeMean = std::is_same_v<T, at::BFloat16> ? 100
                                       : std::is_same_v<T, at::Half>   ? 1000
                                                                       : 1e4;
  static constexpr double kRounding = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  // The narrowest pack: two vectors of 32 bytes.
  static constexpr int64_t kWidth = 64 / static_cast<int64_t>(sizeof(Acc));

  /// The error bound of batch_norm_cpu.h for statistics whose lanes add at most `additions` terms.
  static void expect_statistics(const Welford<double>& got, const Welford<long double>& want,
                                int64_t additions, int64_t merges, const std::string& what) {
    const double mean = static_cast<double>(want.mean);
    const double variance = static_cast<double>(want.m2 / want.count);
    const double bound = variance_error(additions, kRounding, merges, variance, std::fabs(mean));
    EXPECT_NEAR(got.m2 / got.count, variance, bound) << what;
    // If all values are equal, the sum is exact, and so is the mean.
    EXPECT_NEAR(got.mean, mean, variance > 0 ? bound / std::sqrt(variance) : 0) << what;
  }

 public:
  std::vector<T> random_values(int64_t count, double mean) {
    std::normal_distribution<double> normal(mean, 1.0);
    std::vector<T> values(count);
    for (T& v : values) {
      v = static_cast<T>(static_cast<float>(normal(random_)));
    }
    return values;
  }

 private:
  const uint64_t seed_ = testing::fresh_seed();
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
      auto x = this->random_values(rows * channels, -this->kLargeMean);
      for (int64_t i = 0; i < rows * channels; ++i) {  // a different mean for each channel
        x[i] =
            static_cast<T>(static_cast<float>(x[i]) - 16.0f * static_cast<float>(i % channels % 7));
      }
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

TYPED_TEST(BatchNormCpu, PlanesStatistics_FirstValuesFarFromTheOthers_AreNoLessExact) {
  // Deviations are taken from the mean of the first few values, which here is far from the overall
  // mean.
  using T = TypeParam;
  const int64_t count = 4096;
  std::vector<T> x(count, static_cast<T>(9984.0f));
  for (int64_t i = 64; i < count; ++i) {
    x[i] = static_cast<T>(0.7f * (1.0f + 0.37f * static_cast<float>(i % 3)));
  }
  const Welford<long double> want = two_pass<T>({x.data()}, count, 1);
  for (const CpuVariant* variant : usable_variants()) {
    const Welford<double> got =
        kernels_of<T>(*variant).planes_statistics(x.data(), Planes{1, 1, count}, 0);
    // Few roundings if the deviations are minimal, a hundred times as many otherwise.
    const double relative = std::fabs(static_cast<double>(got.m2 / want.m2 - 1));
    EXPECT_LE(relative, 200 * this->kRounding) << variant->name;
  }
}

/// Elements in either layout, and their positions. In planes layout one channel is computed, in
/// rows layout all of them.
template <typename T>
struct Elementwise {
  bool rows;
  Planes sizes;
  Lines<T> x, dy, extra;  // extra: forward, the tensor to add; backward, the output

  int64_t count() const { return static_cast<int64_t>(x.size()); }
  int64_t channel(int64_t i) const {
    return rows ? i % sizes.channels : i / sizes.plane % sizes.channels;
  }
  bool computed(int64_t i) const { return rows || channel(i) == 1; }
  std::string name() const {
    return (rows ? "rows of " + std::to_string(sizes.channels)
                 : "planes of " + std::to_string(sizes.plane));
  }
};

/// Sizes around full packs of every instruction set, and rows too wide for one pass.
template <typename T, typename Fixture>
std::vector<Elementwise<T>> elementwise_cases(Fixture& fixture) {
  std::vector<Elementwise<T>> cases;
  const auto add = [&](bool rows, Planes sizes) {
    const int64_t count = sizes.batch * sizes.channels * sizes.plane;
    const auto values = [&] {
      const auto plain = fixture.random_values(count, 0);
      return Lines<T>(plain.begin(), plain.end());
    };
    cases.push_back({rows, sizes, values(), values(), values()});
  };
  for (const int64_t plane : {1, 7, 16, 33, 49, 64, 128}) {
    add(false, {2, 3, plane});
  }
  for (const int64_t channels : {1, 3, 16, 17, 33, 64, 96, 130, 640}) {
    add(true, {1, channels, 7});
  }
  return cases;
}

/// Calls each(kernels, case, failure message) for all cases in every instruction set.
template <typename T, typename Fixture, typename Each>
void for_each_elementwise_case(Fixture& fixture, const Each& each) {
  const auto cases = elementwise_cases<T>(fixture);
  for (const CpuVariant* variant : usable_variants()) {
    for (const auto& data : cases) {
      each(kernels_of<T>(*variant), data, std::string(variant->name) + " " + data.name());
    }
  }
}

template <typename Acc>
std::vector<Acc> per_channel(int64_t channels, Acc first) {
  std::vector<Acc> values(channels);
  for (int64_t c = 0; c < channels; ++c) {
    values[c] = first + static_cast<Acc>(c % 13) / Acc(8);
  }
  return values;
}

TYPED_TEST(BatchNormCpu, Normalize_EveryCombination_IsTheFormulaAndStreamedTheSame) {
  using T = TypeParam;
  using Acc = typename CpuKernels<T>::Acc;
  for_each_elementwise_case<T>(
      *this, [](const CpuKernels<T>& k, const Elementwise<T>& data, const std::string& name) {
        const int64_t channels = data.sizes.channels;
        const auto high = per_channel<Acc>(channels, -0.5);
        const auto scale = per_channel<Acc>(channels, 0.75);
        const auto shift = per_channel<Acc>(channels, -1);
        for (const bool adds : {false, true}) {
          for (const bool relu : {false, true}) {
            const T* z = adds ? data.extra.data() : nullptr;
            const auto run = [&](bool stream) {
              Lines<T> y(data.x.size(), static_cast<T>(77.0f));
              if (data.rows) {
                k.rows_normalize(data.x.data(), z, y.data(), 0, 3, channels, high.data(),
                                 scale.data(), shift.data(), relu, stream);
                k.rows_normalize(data.x.data(), z, y.data(), 3, 7, channels, high.data(),
                                 scale.data(), shift.data(), relu, stream);
              } else {
                k.planes_normalize(data.x.data(), z, y.data(), data.sizes, 1,
                                   {high[1], scale[1], shift[1]}, relu, stream);
              }
              return y;
            };
            const auto y = run(false);
            const std::string what = name + (adds ? ", added" : "") + (relu ? ", ReLU" : "");
            EXPECT_EQ(std::memcmp(run(true).data(), y.data(), y.size() * sizeof(T)), 0) << what;
            for (int64_t i = 0; i < data.count(); ++i) {
              const int64_t c = data.channel(i);
              const double product = (static_cast<double>(data.x[i]) - high[c]) * scale[c];
              const double added = adds ? static_cast<double>(data.extra[i]) : 0;
              const double value = product + shift[c] + added;
              expect_rounded(y[i],
                             !data.computed(i) ? 77.0
                             : relu            ? std::max(0.0, value)
                                               : value,
                             std::fabs(product) + std::fabs(added) + 2, what);
            }
          }
        }
      });
}

TYPED_TEST(BatchNormCpu, Gradient_EveryMask_IsTheFormulaAndStreamedTheSame) {
  using T = TypeParam;
  using Acc = typename CpuKernels<T>::Acc;
  for_each_elementwise_case<T>(*this, [](const CpuKernels<T>& k, const Elementwise<T>& data,
                                         const std::string& name) {
    const int64_t channels = data.sizes.channels;
    const auto high = per_channel<Acc>(channels, -0.5);
    const auto scale = per_channel<Acc>(channels, 0.75);
    const auto shift = per_channel<Acc>(channels, 0.25);
    const auto dy_scale = per_channel<Acc>(channels, 1.5);
    const auto x_scale = per_channel<Acc>(channels, -0.25);
    const auto constant = per_channel<Acc>(channels, 0.125);
    const Acc* forward[] = {high.data(), scale.data(), shift.data()};
    const Acc* backward[] = {dy_scale.data(), x_scale.data(), constant.data()};
    for (const ReluMask mask : {ReluMask::kNone, ReluMask::kRecompute, ReluMask::kOutput}) {
      const auto run = [&](bool stream, Lines<T>& dx, Lines<T>& dz) {
        dx.assign(data.x.size(), static_cast<T>(77.0f));
        dz = dx;
        T* to_z = mask == ReluMask::kNone ? nullptr : dz.data();
        if (data.rows) {
          k.rows_gradient(data.dy.data(), data.x.data(), data.extra.data(), dx.data(), to_z, 0, 7,
                          channels, forward, backward, mask, stream);
        } else {
          k.planes_gradient(data.dy.data(), data.x.data(), data.extra.data(), dx.data(), to_z,
                            data.sizes, 1, {high[1], scale[1], shift[1]},
                            {high[1], dy_scale[1], x_scale[1], constant[1]}, mask, stream);
        }
      };
      Lines<T> dx, dz, streamed_dx, streamed_dz;
      run(false, dx, dz);
      run(true, streamed_dx, streamed_dz);
      const std::string what = name + ", mask " + std::to_string(static_cast<int>(mask));
      EXPECT_EQ(std::memcmp(streamed_dx.data(), dx.data(), dx.size() * sizeof(T)), 0) << what;
      EXPECT_EQ(std::memcmp(streamed_dz.data(), dz.data(), dz.size() * sizeof(T)), 0) << what;
      for (int64_t i = 0; i < data.count(); ++i) {
        const int64_t c = data.channel(i);
        const double centered = static_cast<double>(data.x[i]) - high[c];
        const double value = mask == ReluMask::kOutput ? static_cast<double>(data.extra[i])
                                                       : centered * scale[c] + shift[c];
        if (mask == ReluMask::kRecompute && std::fabs(value) < 1e-5) {
          continue;  // too close to zero: the kernel may see the other sign
        }
        const double g = mask == ReluMask::kNone || value > 0 ? static_cast<double>(data.dy[i]) : 0;
        const double product = g * dy_scale[c];
        const double other = centered * x_scale[c];
        const bool computed = data.computed(i);
        expect_rounded(dx[i], computed ? product + other + constant[c] : 77.0,
                       std::fabs(product) + std::fabs(other) + 2, what);
        const bool has_z = computed && mask != ReluMask::kNone;
        EXPECT_EQ(static_cast<double>(dz[i]), has_z ? g : 77.0) << what;
      }
    }
  });
}

TEST(BatchNormCpuBFloat16, EveryBitPattern_ComesBackAsItWas) {
  using T = at::BFloat16;
  const std::vector<float> zeros(32, 0.0f), ones(32, 1.0f);
  const int64_t count = 1 << 16;
  Lines<T> x(count), y(count);
  for (int64_t i = 0; i < count; ++i) {
    x[i] = T(static_cast<unsigned short>(i), T::from_bits());
  }
  for (const CpuVariant* variant : usable_variants()) {
    for (const bool relu : {false, true}) {
      variant->bfloat16->rows_normalize(x.data(), nullptr, y.data(), 0, count / 32, 32,
                                        zeros.data(), ones.data(), zeros.data(), relu, false);
      for (int64_t i = 0; i < count; ++i) {
        const float value = static_cast<float>(x[i]);
        if (std::isnan(value)) {
          EXPECT_TRUE(std::isnan(static_cast<float>(y[i]))) << variant->name << " " << i;
        } else {
          EXPECT_EQ(static_cast<float>(y[i]), relu ? std::max(value, 0.0f) : value)
              << variant->name << " " << i;
        }
      }
    }
  }
}

TEST(BatchNormCpuBFloat16, Results_AreRoundedToNearestAndTiesToEven) {
  using T = at::BFloat16;
  const int64_t count = 1 << 16;
  const std::vector<float> zeros(32, 0.0f);
  Lines<T> x(count), y(count);
  for (int64_t i = 0; i < count; ++i) {
    x[i] = T(static_cast<unsigned short>(i), T::from_bits());
  }
  // Products of 8 by 9 bits can be ties; 1.00390625 is 257 / 256, and the last factor overflows.
  for (const float factor : {1.00390625f, 1.5f, 0.3f, 3e-20f, 1e20f}) {
    const std::vector<float> scale(32, factor);
    for (const CpuVariant* variant : usable_variants()) {
      variant->bfloat16->rows_normalize(x.data(), nullptr, y.data(), 0, count / 32, 32,
                                        zeros.data(), scale.data(), zeros.data(), false, false);
      for (int64_t i = 0; i < count; ++i) {
        const float want = static_cast<float>(T(static_cast<float>(x[i]) * factor));
        if (!std::isnan(want)) {
          EXPECT_EQ(static_cast<float>(y[i]), want) << variant->name << " " << factor << " " << i;
        }
      }
    }
  }
}

TEST(BatchNormCpuBFloat16, NaNOfAnyBitsInACoefficient_IsNoNumber) {
  using T = at::BFloat16;
  float all_ones;
  const uint32_t bits = 0xffffffffu;
  std::memcpy(&all_ones, &bits, sizeof(bits));
  const std::vector<float> broken(40, all_ones), ones(40, 1.0f);
  const float* forward[] = {ones.data(), ones.data(), ones.data()};
  const float* backward[] = {ones.data(), broken.data(), ones.data()};
  const Lines<T> x(80, T(2.0f));
  const auto expect_nan = [](const Lines<T>& y, const std::string& what) {
    for (const T value : y) {
      EXPECT_TRUE(std::isnan(static_cast<float>(value))) << what;
    }
  };
  for (const CpuVariant* variant : usable_variants()) {
    const CpuKernels<T>& k = *variant->bfloat16;
    for (const bool relu : {false, true}) {
      Lines<T> y(80);
      k.rows_normalize(x.data(), nullptr, y.data(), 0, 2, 40, ones.data(), broken.data(),
                       ones.data(), relu, false);
      expect_nan(y, std::string(variant->name) + " rows");
      k.planes_normalize(x.data(), nullptr, y.data(), Planes{1, 1, 80}, 0, {1.0f, all_ones, 1.0f},
                         relu, false);
      expect_nan(y, std::string(variant->name) + " planes");
    }
    Lines<T> dx(80);
    k.rows_gradient(x.data(), x.data(), nullptr, dx.data(), nullptr, 0, 2, 40, forward, backward,
                    ReluMask::kNone, false);
    expect_nan(dx, std::string(variant->name) + " gradient");
  }
}

TYPED_TEST(BatchNormCpu, RowsReduce_AnyWidth_StaysWithinTheBound) {
  using T = TypeParam;
  using Acc = typename CpuKernels<T>::Acc;
  for (const CpuVariant* variant : usable_variants()) {
    for (const int64_t channels : {1, 3, 16, 17, 33, 70, 640}) {
      const int64_t rows = 139;
      const auto x = this->random_values(rows * channels, 3);
      const auto dy = this->random_values(rows * channels, 0.5);
      const auto high = per_channel<Acc>(channels, 3);
      const auto scale = per_channel<Acc>(channels, 1);
      const auto shift = per_channel<Acc>(channels, 0.25);
      for (const ReluMask mask : {ReluMask::kNone, ReluMask::kOutput}) {
        std::vector<double> sum(channels), dot(channels);
        kernels_of<T>(*variant).rows_reduce(dy.data(), x.data(), x.data(), 0, rows, channels,
                                            high.data(), scale.data(), shift.data(), mask,
                                            sum.data(), dot.data());
        for (int64_t c = 0; c < channels; ++c) {
          double want_sum = 0, want_dot = 0, sum_size = 0, dot_size = 0;
          for (int64_t i = c; i < rows * channels; i += channels) {
            const bool through = mask == ReluMask::kNone || static_cast<double>(x[i]) > 0;
            const double g = through ? static_cast<double>(dy[i]) : 0;
            const double product = g * (static_cast<double>(x[i]) - high[c]);
            want_sum += g;
            want_dot += product;
            sum_size += std::fabs(g);
            dot_size += std::fabs(product);
          }
          const double bound = (128 + 3) * this->kRounding;
          EXPECT_NEAR(sum[c], want_sum, bound * sum_size) << variant->name << " " << channels;
          EXPECT_NEAR(dot[c], want_dot, bound * dot_size) << variant->name << " " << channels;
        }
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
      // Each lane adds rounded products of rounded deviations, for at most 4096 elements.
      const int64_t packs = (std::min<int64_t>(plane, 4096) + this->kWidth - 1) / this->kWidth;
      const double bound =
          static_cast<double>((plane < 4096 ? 2 * packs : packs) + 3) * this->kRounding +
          1e-15 * static_cast<double>(plane);
      EXPECT_NEAR(got.sum_dy, sum, bound * sum_size) << variant->name << " " << plane;
      EXPECT_NEAR(got.sum_dy_xmu, dot, bound * dot_size) << variant->name << " " << plane;
    }
  }
}

}  // namespace
}  // namespace apex::kernels
