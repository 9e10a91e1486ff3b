// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

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

 private:
  const std::string name_;
};

bool averages(const std::string& backend, at::DeviceType of_backend, at::DeviceType of_bucket,
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
  return choose_reduction(site)->traits().averages;
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

}  // namespace
}  // namespace apex::parallel::detail
