// SPDX-License-Identifier: BSD-3-Clause
// Tables: which reduction divides, and the factors before and after the sum.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reducer/reduction.h"

namespace apex::parallel::detail {
namespace {

class NamedBackend final : public c10d::Backend {
 public:
  NamedBackend(std::string name, int size) : Backend(0, size), name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::AllreduceOptions& /*options*/) override {
    const auto done = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    done->markCompleted();
    return c10d::Work::create_from_future(done);
  }

 private:
  const std::string name_;
};

auto chosen(const std::string& backend, at::DeviceType of_backend, at::DeviceType of_bucket,
            bool plain_average, at::ScalarType dtype = at::kFloat, int world = 2) {
  ReductionSite site;
  site.group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, world);
  site.group->setBackend(
      of_backend, c10d::ProcessGroup::BackendType::CUSTOM,
      c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<NamedBackend>(backend, world)));
  site.device = at::Device(of_bucket, of_bucket == at::kCPU ? -1 : 0);
  site.plain_average = plain_average;
  site.dtype = dtype;
  return choose_reduction(site);
}

template <typename... Site>
bool averages(const Site&... site) {
  return chosen(site...)->traits().averages;
}

TEST(AllReduce, Dropped_IsAsBeforeItsStart) {
  const auto reduction = chosen("gloo", at::kCPU, at::kCPU, true);
  const BucketMessage message({0}, {at::zeros({2})}, at::kCPU, {});
  reduction->start(message, at::zeros({2}), "sum");
  EXPECT_TRUE(reduction->done());
  reduction->drop();
  EXPECT_FALSE(reduction->done());
}

// Exactly one side divides. The traits determine how gradients are scaled before and after.
TEST(AllReduce, NcclOnItsDevice_Averages_AndNobodyElse) {
  for (const char* name : {"nccl", "nccl2", "nccl-lazy"}) {
    EXPECT_TRUE(averages(name, at::kCUDA, at::kCUDA, true)) << name;
    EXPECT_FALSE(averages(name, at::kCUDA, at::kCUDA, false)) << name;  // sums, or predivides
    EXPECT_FALSE(averages(name, at::kCUDA, at::kCPU, true)) << name;
  }
  EXPECT_FALSE(averages("gloo", at::kCUDA, at::kCUDA, true));
  EXPECT_FALSE(averages("gloo", at::kCPU, at::kCPU, true));
  EXPECT_FALSE(averages("nccl", at::kCPU, at::kCPU, true));
}

// NCCL rounds 1/N and each product with it to the dtype before the sum.
TEST(AllReduce, NcclAveragesOnlyWhereThatRoundsNoMoreThanADivision) {
  const auto on_nccl = [](at::ScalarType dtype, int world) {
    return averages("nccl", at::kCUDA, at::kCUDA, true, dtype, world);
  };
  for (const int world : {2, 3, 8, 12, 1000, 1024}) {
    const bool power_of_two = world == 2 || world == 8 || world == 1024;
    EXPECT_TRUE(on_nccl(at::kFloat, world)) << world;
    EXPECT_TRUE(on_nccl(at::kDouble, world)) << world;
    EXPECT_FALSE(on_nccl(at::kHalf, world)) << world;
    EXPECT_EQ(on_nccl(at::kBFloat16, world), power_of_two) << world;
  }
}

TEST(Averaging, EveryWay_BeforeAndAfter_GiveTheAverage) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const double factor : {1.0, 4.0}) {
      for (const bool averages : {false, true}) {
        for (const int64_t divisor : {3, 8}) {
          ReducerOptions options;
          options.gradient_predivide_factor = factor;
          ReductionTraits traits;
          traits.averages = averages;
          const auto [before, after] = averaging_of(options, traits, dtype, divisor, 8);
          EXPECT_DOUBLE_EQ(before * (averages ? 1.0 / 8 : 1.0) * after,
                           1.0 / static_cast<double>(divisor));
          // Dividing first would underflow small 16-bit gradients.
          EXPECT_EQ(before, averages ? 1.0 : 1.0 / factor);
        }
      }
    }
  }
}

ReducerOptions weighted() {
  ReducerOptions options;
  options.weighted = true;
  return options;
}

// If the terms fit into half, so does their sum: the scale is a power of two and is undone exactly.
TEST(Averaging, Weighted_HalfIsScaledByTheNumberOfRanks) {
  for (const int64_t ranks : {1, 2, 3, 4, 5, 8}) {
    const Averaging factors = averaging_of(weighted(), {}, at::kHalf, ranks, ranks, 48);
    int exponent = 0;
    EXPECT_EQ(std::frexp(factors.before, &exponent), 0.5) << ranks;  // a power of two
    EXPECT_LE(factors.before * static_cast<double>(ranks), 1.0);
    EXPECT_GT(factors.before * static_cast<double>(ranks), 0.5);
    EXPECT_EQ(factors.before * factors.after, 1.0 / 48);
  }
}

TEST(Averaging, Weighted_AverageOfACommunicationHookIsUndone) {
  ReductionTraits hook;
  hook.averages = true;
  const Averaging factors = averaging_of(weighted(), hook, at::kFloat, 3, 3, 48);
  EXPECT_EQ(factors.before, 1.0);
  EXPECT_EQ(factors.after, 3.0 / 48);
}

}  // namespace
}  // namespace apex::parallel::detail
