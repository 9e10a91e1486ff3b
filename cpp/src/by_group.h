// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::parallel {

/// Values by process group. Keeps only weak references. A weak reference reserves the group's
/// address until the group is found expired. Not thread safe.
template <typename Value>
class ByGroup {
 public:
  /// Null if there is none.
  Value* find(const c10d::ProcessGroup& group) {
    const auto found = entries_.find(&group);
    return found == entries_.end() ? nullptr : &found->second.value;
  }

  void put(const c10d::ProcessGroup& group, Value value) {
    // intrusive_ptr changes the reference count, so the group must not be const.
    auto strong = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(
        const_cast<c10d::ProcessGroup*>(&group));
    entries_.insert_or_assign(&group, Entry{Weak(strong), std::move(value)});
  }

  /// Values of destroyed groups. The caller must destroy the values without holding a lock.
  std::vector<Value> take_gone() {
    std::vector<Value> gone;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (entry->second.group.expired()) {
        gone.push_back(std::move(entry->second.value));
        entry = entries_.erase(entry);
      } else {
        ++entry;
      }
    }
    return gone;
  }

  std::vector<Value> values() const {
    std::vector<Value> all;
    for (const auto& entry : entries_) all.push_back(entry.second.value);
    return all;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Entry {
    Weak group;
    Value value;
  };
  std::unordered_map<const c10d::ProcessGroup*, Entry> entries_;
};

}  // namespace apex::parallel
