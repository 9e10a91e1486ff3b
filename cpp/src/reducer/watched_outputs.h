// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/function.h>  // torch 2.11 has no node.h

namespace apex::parallel::detail {

/// An output that backward may reach. It lives as long as its hook.
struct WatchedOutput {
  torch::autograd::Node* node;
};

/// The watched outputs of one reducer. Thread safe. Its mutex is never held during a wait. (It does
/// not use the reducer's mutex, because another thread's backward may hold it while that thread
/// waits for other ranks, which may wait for this rank.)
class WatchedOutputs {
 public:
  void add(const std::shared_ptr<const WatchedOutput>& output);
  /// Whether an output is among the nodes of a backward.
  bool lie_in(const std::unordered_set<torch::autograd::Node*>& nodes);

 private:
  std::mutex mutex_;  ///< guards the rest
  std::vector<std::weak_ptr<const WatchedOutput>> outputs_;
  size_t most_ = 0;  ///< at this size, expired outputs are removed
};

}  // namespace apex::parallel::detail
