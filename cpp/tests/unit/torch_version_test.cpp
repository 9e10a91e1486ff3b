// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>

#include "torch_version.h"

namespace apex::parallel::detail {
namespace {

/// As torch 2.14 and later allow: rank and size can change.
class ReconfiguredGroup final : public c10d::ProcessGroup {
 public:
  ReconfiguredGroup() : ProcessGroup(c10::make_intrusive<c10d::HashStore>(), 0, 4) {}
  int getRank() const override { return rank; }
  int getSize() const override { return size; }

  int rank = 3;
  int size = 4;
};

TEST(TorchVersion, BackendNamesOfEveryVersion_IsNccl_KnowsThoseOfNccl) {
  for (const char* name : {"nccl", "nccl2", "nccl-lazy"}) EXPECT_TRUE(is_nccl(name)) << name;
  for (const char* name : {"", "gloo", "mpi", "ucc", "undefined", "custom", "thread"}) {
    EXPECT_FALSE(is_nccl(name)) << name;
  }
}

TEST(TorchVersion, GroupThatWasReconfigured_RequireSameRanks_ThrowsBothRanksAndTheRemedy) {
  const auto group = c10::make_intrusive<ReconfiguredGroup>();
  EXPECT_NO_THROW(require_same_ranks(*group, 3, 4, "this reducer"));
  const auto message = [&] {
    try {
      require_same_ranks(*group, 3, 4, "this reducer");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  group->rank = 2;
  EXPECT_NE(message().find("rank 2 of 4: the process group was reconfigured"), std::string::npos)
      << message();
  group->size = 3;
  EXPECT_NE(message().find("this reducer was created when this was rank 3 of 4"), std::string::npos)
      << message();
  EXPECT_NE(message().find("Construct a new wrapper on every rank"), std::string::npos)
      << message();
}

}  // namespace
}  // namespace apex::parallel::detail
