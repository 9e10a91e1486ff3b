// SPDX-License-Identifier: BSD-3-Clause
// Every block and thread of the batch-norm CUDA kernels on the host: a step of several ranks
// against float64, for all sizes, types, layouts, alignments and orders of threads.
//
// A failure prints the seed of the inputs, and APEX_TEST_SEED chooses another one. Every
// array ends at inaccessible memory.

#include "kernels/batch_norm_cuda.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/cuda_emulator/cuda_emulator.h"
#include "support/launch_shapes.h"
#include "support/test_seed.h"

namespace apex::kernels {
namespace {

using testing::cuda::last_error;
using testing::cuda::set_order;

/// An array that ends at an inaccessible page. It starts at a multiple of 16 bytes, or, if not
/// `aligned`, at a multiple of the element size only.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t count, bool aligned = true) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    bytes_ = (bytes + 32 + page - 1) / page * page + page;
    memory_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_ + bytes_ - page, page, PROT_NONE);
    std::memset(memory_, 0xff, bytes_ - page);  // NaN
    char* begin = memory_ + bytes_ - page - bytes;
    const size_t past = reinterpret_cast<uintptr_t>(begin) % 16;
    if (aligned) {
      begin -= past;
    } else if (past == 0) {
      begin -= sizeof(T);
    }
    data_ = reinterpret_cast<T*>(begin);
  }
  ~Guarded() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  Guarded(Guarded&& other) noexcept
      : count_(other.count_),
        bytes_(other.bytes_),
        memory_(std::exchange(other.memory_, nullptr)),
        data_(other.data_) {}
  Guarded& operator=(Guarded&&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  int64_t count_;
  size_t bytes_;
  char* memory_;
  T* data_;
};

/// Relative rounding errors of T and of its compute type, and the absolute error for values so
/// small that T has fewer digits.
template <typename T>
struct Traits;
template <>
struct Traits<float> {
  static constexpr c10::ScalarType kElement = c10::ScalarType::Float;
  static constexpr double kUnit = 0x1p-24, kRounding = 0x1p-24, kTiny = 0;
};
template <>
struct Traits<double> {
  static constexpr c10::ScalarType kElement = c10::ScalarType::Double;
  static constexpr double kUnit = 0x1p-53, kRounding = 0x1p-53, kTiny = 0;
};
template <>
struct Traits<c10::Half> {
  static constexpr c10::ScalarType kElement = c10::ScalarType::Half;
  static constexpr double kUnit = 0x1p-11, kRounding = 0x1p-24, kTiny = 0x1p-25;
};
template <>
struct Traits<c10::BFloat16> {
  static constexpr c10::ScalarType kElement = c10::ScalarType::BFloat16;
  static constexpr double kUnit = 0x1p-8, kRounding = 0x1p-24, kTiny = 0;
};

/// A parameter of the type that goes with T.
template <typename T>
struct Param {
  using Value = std::conditional_t<std::is_same_v<T, double>, double, float>;
  explicit Param(int64_t channels) : values(channels) {}
  ChannelArray argument() {
    if constexpr (std::is_same_v<T, double>)
      return {nullptr, values.data()};
    else
      return {values.data(), nullptr};
  }
  double operator[](int64_t c) const { return static_cast<double>(values[c]); }
  Guarded<Value> values;
};

// With few multiprocessors, a launch has no more blocks than there is work for. With many, channels
// and tiles are split over blocks.
constexpr DeviceLimits kSmall{2, 1024};
constexpr DeviceLimits kLarge{132, 2048};

/// The parameters of a case.
struct Case {
  bool rows = false;
  Planes sizes{};                  // of one rank; batch is per rank
  std::vector<int64_t> batches{};  // of each rank
  bool aligned = true;
  DeviceLimits limits = kSmall;
  bool affine = true;
  double momentum = 0.1;
  uint64_t order = 0;
  double mean = 0;

  std::string name() const {
    std::string text = rows ? "rows" : "planes";
    text += " " + std::to_string(sizes.channels) + "x" + std::to_string(sizes.plane) + " batches";
    for (const int64_t batch : batches) text += " " + std::to_string(batch);
    return text + (aligned ? " aligned" : "") + (affine ? " affine" : "") + " order " +
           std::to_string(order) + " multiprocessors " + std::to_string(limits.multiprocessors);
  }
};

template <typename T>
class BatchNormCuda : public ::testing::Test {
 protected:
  void TearDown() override {
    set_order(0);
    if (HasFailure()) {
      std::cerr << "repeat with APEX_TEST_SEED=" << seed_ << std::endl;
    }
  }

  template <typename V>
  void fill(Guarded<V>& values, double mean, double deviation) {
    std::normal_distribution<double> normal(mean, deviation);
    for (int64_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<V>(static_cast<float>(normal(random_)));
    }
  }

  /// One rank's data.
  struct Rank {
    Rank(const Case& c, int64_t batch)
        : count(batch * c.sizes.channels * c.sizes.plane),
          x(count, c.aligned),
          y(count, c.aligned),
          dy(count, c.aligned),
          dx(count, c.aligned),
          record(statistics_length(c.sizes.channels)),
          running_mean(c.sizes.channels),
          running_var(c.sizes.channels),
          batches(1),
          mean(c.sizes.channels),
          invstd(c.sizes.channels),
          total(1),
          sums(2 * c.sizes.channels),
          dweight(c.sizes.channels),
          dbias(c.sizes.channels) {}
    int64_t count;
    Guarded<T> x, y, dy, dx;
    Guarded<double> record;
    Param<T> running_mean, running_var;
    Guarded<int64_t> batches;
    Guarded<double> mean, invstd;
    Guarded<int64_t> total;
    Guarded<double> sums;
    Param<T> dweight, dbias;
  };

  /// A call whose work area is used up to its end.
  struct Work {
    Work(const Case& c, int64_t batch)
        : call{Traits<T>::kElement,
               c.rows,
               {batch, c.sizes.channels, c.sizes.plane},
               c.aligned,
               c.limits,
               nullptr,
               nullptr},
          partial(partial_length(call)) {
      call.partial = partial.data();
    }
    CudaCall call;
    Guarded<double> partial;
  };

  int64_t channel_of(const Case& c, int64_t i) const {
    return c.rows ? i % c.sizes.channels : i / c.sizes.plane % c.sizes.channels;
  }

  /// Forward and backward of all ranks, against float64.
  void check(const Case& c) {
    SCOPED_TRACE(c.name());
    set_order(c.order);
    const int64_t channels = c.sizes.channels;
    const auto world = static_cast<int64_t>(c.batches.size());
    const double eps = 1e-3;
    Param<T> weight(channels), bias(channels);
    fill(weight.values, 1, 0.3);
    fill(bias.values, 0, 0.3);
    std::vector<Rank> ranks;
    for (const int64_t batch : c.batches) {
      Rank& rank = ranks.emplace_back(c, batch);
      fill(rank.x, c.mean, 1);
      fill(rank.dy, 0, 1);
      rank.batches[0] = 4;
      for (int64_t k = 0; k < channels; ++k) {
        rank.running_mean.values[k] = static_cast<typename Param<T>::Value>(0.5f);
        rank.running_var.values[k] = static_cast<typename Param<T>::Value>(2.0f);
      }
    }

    // ---- forward ----
    Guarded<double> records(world * statistics_length(channels));
    for (int64_t r = 0; r < world; ++r) {
      Work work(c, c.batches[r]);
      ASSERT_EQ(launch_statistics(work.call, ranks[r].x.data(), ranks[r].record.data(),
                                  ranks[r].batches.data()),
                0)
          << last_error();
      EXPECT_EQ(ranks[r].batches[0], 5);
      std::copy_n(ranks[r].record.data(), ranks[r].record.size(),
                  records.data() + r * statistics_length(channels));
    }
    for (int64_t r = 0; r < world; ++r) {
      Rank& rank = ranks[r];
      NormalizeArguments a{};
      a.x = rank.x.data();
      a.out = rank.y.data();
      if (c.affine) {
        a.weight = weight.argument();
        a.bias = bias.argument();
      }
      a.eps = eps;
      a.records = records.data();
      a.ranks = world;
      a.momentum = c.momentum;
      a.num_batches = rank.batches.data();
      a.running_mean = rank.running_mean.argument();
      a.running_var = rank.running_var.argument();
      a.mean = rank.mean.data();
      a.invstd = rank.invstd.data();
      a.count = rank.total.data();
      Work work(c, c.batches[r]);
      ASSERT_EQ(launch_normalize(work.call, a), 0) << last_error();
    }

    // Computed in a wider type than float64 where available.
    std::vector<long double> mean(channels), m2(channels);
    std::vector<double> invstd(channels);
    int64_t count = 0;
    for (const Rank& rank : ranks) {
      count += rank.count / channels;
      for (int64_t i = 0; i < rank.count; ++i)
        mean[channel_of(c, i)] += static_cast<double>(rank.x[i]);
    }
    for (long double& value : mean) value /= static_cast<long double>(count);
    for (const Rank& rank : ranks) {
      for (int64_t i = 0; i < rank.count; ++i) {
        const long double deviation = static_cast<double>(rank.x[i]) - mean[channel_of(c, i)];
        m2[channel_of(c, i)] += deviation * deviation;
      }
    }
    const double factor = std::isnan(c.momentum) ? 1.0 / 5 : c.momentum;
    constexpr double kRounding = Traits<T>::kRounding;
    constexpr double kUnit = Traits<T>::kUnit;
    // The mean is a float64, so a large mean loses its last digits.
    const double lost = 4 * 0x1p-52 * std::fabs(c.mean);
    constexpr double param_unit = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
    for (int64_t k = 0; k < channels; ++k) {
      invstd[k] = static_cast<double>(1 / std::sqrt(m2[k] / static_cast<long double>(count) + eps));
      for (const Rank& rank : ranks) {
        EXPECT_EQ(rank.total[0], count);
        EXPECT_NEAR(rank.mean[k], static_cast<double>(mean[k]), 64 * kRounding + lost)
            << "channel " << k;
        EXPECT_NEAR(rank.invstd[k] / invstd[k], 1, 64 * kRounding + lost) << "channel " << k;
        if (count > 1) {
          const double running_mean = (1 - factor) * 0.5 + factor * static_cast<double>(mean[k]);
          const double running_var = (1 - factor) * 2 + factor * static_cast<double>(m2[k]) /
                                                            static_cast<double>(count - 1);
          EXPECT_NEAR(rank.running_mean[k], running_mean,
                      64 * kRounding + lost + param_unit * std::fabs(running_mean));
          EXPECT_NEAR(rank.running_var[k], running_var,
                      64 * kRounding + lost + param_unit * running_var);
        }
      }
    }
    const auto deviation = [&](const Rank& rank, int64_t i) {
      return static_cast<double>(static_cast<double>(rank.x[i]) - mean[channel_of(c, i)]);
    };
    const auto w = [&](int64_t k) { return c.affine ? weight[k] : 1; };
    const auto b = [&](int64_t k) { return c.affine ? bias[k] : 0; };
    for (Rank& rank : ranks) {
      for (int64_t i = 0; i < rank.count; ++i) {
        const int64_t k = channel_of(c, i);
        const double want = deviation(rank, i) * invstd[k] * w(k) + b(k);
        ASSERT_NEAR(static_cast<double>(rank.y[i]), want,
                    kUnit * std::fabs(want) + (256 * kRounding + lost) * (1 + std::fabs(want)) +
                        Traits<T>::kTiny)
            << "y at " << i;
      }
    }

    // ---- backward ----
    const auto arguments = [&](Rank& rank) {
      GradientArguments a{};
      a.dy = rank.dy.data();
      a.x = rank.x.data();
      a.out = rank.dx.data();
      if (c.affine) {
        a.weight = weight.argument();
        a.dweight = rank.dweight.argument();
        a.dbias = rank.dbias.argument();
      }
      a.mean = rank.mean.data();
      a.invstd = rank.invstd.data();
      a.count = rank.total.data();
      a.sums = rank.sums.data();
      return a;
    };
    for (int64_t r = 0; r < world; ++r) {
      Work work(c, c.batches[r]);
      ASSERT_EQ(launch_reduce(work.call, arguments(ranks[r])), 0) << last_error();
    }
    std::vector<double> all_sums(2 * channels);
    for (const Rank& rank : ranks) {
      for (int64_t i = 0; i < 2 * channels; ++i) all_sums[i] += rank.sums[i];
    }
    for (int64_t r = 0; r < world; ++r) {
      std::copy(all_sums.begin(), all_sums.end(), ranks[r].sums.data());
      Work work(c, c.batches[r]);
      ASSERT_EQ(launch_gradient(work.call, arguments(ranks[r])), 0) << last_error();
    }
    std::vector<double> sum(channels), dot(channels);
    for (const Rank& rank : ranks) {
      std::vector<double> own_sum(channels), own_dot(channels), size(channels);
      for (int64_t i = 0; i < rank.count; ++i) {
        const int64_t k = channel_of(c, i);
        const double term = static_cast<double>(rank.dy[i]) * deviation(rank, i) * invstd[k];
        own_sum[k] += static_cast<double>(rank.dy[i]);
        own_dot[k] += term;
        size[k] += std::fabs(static_cast<double>(rank.dy[i])) + std::fabs(term);
      }
      for (int64_t k = 0; k < channels; ++k) {
        sum[k] += own_sum[k];
        dot[k] += own_dot[k];
        if (c.affine) {
          EXPECT_NEAR(rank.dbias[k], own_sum[k],
                      (256 * kRounding + lost) * size[k] + param_unit * std::fabs(own_sum[k]));
          EXPECT_NEAR(rank.dweight[k], own_dot[k],
                      (256 * kRounding + lost) * size[k] + param_unit * std::fabs(own_dot[k]));
        }
      }
    }
    for (const Rank& rank : ranks) {
      for (int64_t i = 0; i < rank.count; ++i) {
        const int64_t k = channel_of(c, i);
        const double normal = deviation(rank, i) * invstd[k];
        const double want = w(k) * invstd[k] *
                            (static_cast<double>(rank.dy[i]) -
                             (sum[k] + normal * dot[k]) / static_cast<double>(count));
        ASSERT_NEAR(static_cast<double>(rank.dx[i]), want,
                    kUnit * std::fabs(want) +
                        (256 * kRounding + lost) * std::fabs(w(k)) * invstd[k] *
                            (2 + std::fabs(static_cast<double>(rank.dy[i])) + std::fabs(normal)) +
                        Traits<T>::kTiny)
            << "dx at " << i;
      }
    }
  }

 public:
  const uint64_t seed_ = testing::fresh_seed();
  std::mt19937_64 random_{seed_};
};

using ElementTypes = ::testing::Types<float, double, c10::Half, c10::BFloat16>;
TYPED_TEST_SUITE(BatchNormCuda, ElementTypes);

TYPED_TEST(BatchNormCuda, Planes_AnySizes_MatchFloat64) {
  for (const int64_t plane : {1, 6, 7, 16, 49, 64, 196, 1000}) {
    for (const bool aligned : {true, false}) {
      Case c;
      c.sizes = {0, 3, plane};
      c.batches = std::vector<int64_t>{5};
      c.aligned = aligned;
      c.order = this->random_() % 3;
      this->check(c);
    }
  }
}

TYPED_TEST(BatchNormCuda, Rows_AnyWidths_MatchFloat64) {
  for (const int64_t channels : {1, 3, 8, 12, 24, 33, 64, 68, 72, 130}) {
    for (const bool aligned : {true, false}) {
      Case c;
      c.rows = true;
      c.sizes = {0, channels, 29};
      c.batches = std::vector<int64_t>{9};
      c.aligned = aligned;
      c.order = this->random_() % 3;
      this->check(c);
    }
  }
}

TYPED_TEST(BatchNormCuda, ManyBlocks_ShareChannelsAndTiles_MatchFloat64) {
  for (const bool rows : {false, true}) {
    for (int i = 0; i < 4; ++i) {
      const uint64_t order = i < 2 ? i : this->random_() | 2;
      Case c;
      c.rows = rows;
      c.sizes = {0, rows ? 72 : 2, rows ? 700 : 3072};
      c.batches = std::vector<int64_t>{11};
      c.limits = kLarge;
      c.order = order;
      this->check(c);
    }
  }
}

TYPED_TEST(BatchNormCuda, LaunchShapes_UpToResNet50_MatchFloat64) {
  // Each shape in one type of its size; half and bfloat16 alternate.
  int number = 0;
  const int turn = std::is_same_v<TypeParam, c10::BFloat16> ? 1 : 0;
  for (const auto& [shape, input] : testing::launch_shapes()) {
    if (input.element_bytes != sizeof(TypeParam)) continue;
    ++number;
    if (sizeof(TypeParam) == 2 && number % 2 != turn) continue;
    Case c;
    c.rows = input.rows;
    c.sizes = input.sizes;
    c.batches = std::vector<int64_t>{input.sizes.batch};
    c.aligned = input.aligned;
    c.limits = input.limits;
    c.order = this->random_() % 3;
    this->check(c);
    if (this->HasFailure()) return;
  }
  EXPECT_GT(number, 100);
}

TYPED_TEST(BatchNormCuda, Options_AllOfThem_MatchFloat64) {
  for (const bool rows : {false, true}) {
    for (int options = 0; options < 4; ++options) {
      Case c;
      c.rows = rows;
      c.sizes = {0, 8, 36};
      c.batches = std::vector<int64_t>{13};
      c.affine = options & 1;
      c.momentum = options & 2 ? kNoMomentum : 0.1;
      c.order = 1;
      this->check(c);
    }
  }
}

TYPED_TEST(BatchNormCuda, Ranks_UnevenAndEmptyAndMany_MatchFloat64) {
  const std::vector<std::vector<int64_t>> all{
      {3, 7}, {0, 4, 2}, {1, 1, 1, 1, 1}, std::vector<int64_t>(40, 2)};
  for (const bool rows : {false, true}) {
    for (const std::vector<int64_t>& batches : all) {
      Case c;
      c.rows = rows;
      c.sizes = {0, rows ? 6 : 3, batches.size() == 5 ? 1 : 20};
      c.batches = batches;
      c.order = 2;
      this->check(c);
    }
  }
}

TYPED_TEST(BatchNormCuda, LargeMean_IsNoLessExact) {
  for (const bool rows : {false, true}) {
    Case c;
    c.rows = rows;
    c.sizes = {0, 4, 400};
    c.batches = std::vector<int64_t>{6, 3};
    c.limits = kLarge;
    // One standard deviation contains more than one value of the type.
    c.mean = std::is_same_v<TypeParam, c10::BFloat16> ? 100
             : std::is_same_v<TypeParam, c10::Half>   ? 1000
                                                      : 1e4;
    this->check(c);
  }
}

/// The driver is queried once per kernel and device.
TYPED_TEST(BatchNormCuda, Blocks_AreThoseThatTheDeviceRunsAtOnce) {
  Case c;
  c.sizes = {0, 1, 1 << 17};
  c.batches = std::vector<int64_t>{1};
  c.limits = {2, 2048};
  typename TestFixture::Rank rank(c, 1);
  this->fill(rank.x, 0, 1);
  typename TestFixture::Work work(c, 1);
  static int device = 1;
  ++device;
  ASSERT_EQ(launch_statistics(work.call, rank.x.data(), rank.record.data(), nullptr), 0);
  NormalizeArguments a{};
  a.x = rank.x.data();
  a.out = rank.y.data();
  a.records = rank.record.data();
  a.ranks = 1;
  a.mean = rank.mean.data();
  a.invstd = rank.invstd.data();
  a.count = rank.total.data();
  const auto blocks_of = [&](int number, int threads) {
    testing::cuda::set_device(number, threads);
    EXPECT_EQ(launch_normalize(work.call, a), 0);
    return testing::cuda::blocks();
  };
  EXPECT_EQ(blocks_of(100 + device, 512), 4u);
  EXPECT_EQ(blocks_of(200 + device, 1280), 10u);
  EXPECT_EQ(blocks_of(100 + device, 1280), 4u);
  testing::cuda::set_device(0, 2048);
}

}  // namespace
}  // namespace apex::kernels
