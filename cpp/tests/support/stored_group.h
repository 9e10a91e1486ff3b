// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Ranks of one process that share a store and call no collective, to test their use of the store.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing {

/// For programs that compile in code which asks a backend for its options. They define
/// apex::distributed::gloo_options() with this class.
class SilentBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "silent"; }
  /// With the shortest useful timeout: an eighth of it is half a second, the minimum patience.
  const c10::intrusive_ptr<Options> options =
      c10::make_intrusive<Options>("silent", std::chrono::seconds(4));
};

/// One group per rank, as in separate processes.
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
