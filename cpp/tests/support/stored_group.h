// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Ranks of one process that share a store and call no collective: what they tell each other there.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing {

/// For programs that compile in the parts which ask a backend for its timeout: they define
/// apex::distributed::gloo_timeout() and gloo_global_ranks() by this one.
class SilentBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "silent"; }
  /// As short as makes a difference: ranks are waited for for an eighth, and for half a second.
  std::chrono::milliseconds timeout() const { return std::chrono::seconds(4); }
  /// By rank, as Gloo has them for a group of some ranks of the job.
  std::vector<uint64_t> global_ranks;
};

/// One group for each rank, as if they were in processes of their own.
inline std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> make_stored_groups(
    int size, const std::string& name,
    const c10::intrusive_ptr<c10d::Store>& store = c10::make_intrusive<c10d::HashStore>()) {
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  for (int rank = 0; rank < size; ++rank) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    group->setBackend(
        c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
        c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<SilentBackend>(rank, size)));
    group->setGroupName(name);
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace apex::testing
