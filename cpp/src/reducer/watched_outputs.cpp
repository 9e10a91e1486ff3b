// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/watched_outputs.h"

#include <algorithm>

namespace apex::parallel::detail {

void WatchedOutputs::add(const std::shared_ptr<const WatchedOutput>& output) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // If the user holds many outputs, they are not scanned in every forward.
  if (outputs_.size() >= most_) {
    outputs_.erase(std::remove_if(outputs_.begin(), outputs_.end(),
                                  [](const auto& held) { return held.expired(); }),
                   outputs_.end());
    most_ = std::max<size_t>(16, 2 * outputs_.size());
  }
  outputs_.push_back(output);
}

bool WatchedOutputs::lie_in(const std::unordered_set<torch::autograd::Node*>& nodes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool any = false;
  for (const auto& held : outputs_) {
    const auto output = held.lock();
    any = any || (output && nodes.count(output->node) != 0);
  }
  return any;
}

}  // namespace apex::parallel::detail
