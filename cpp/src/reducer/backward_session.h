// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A session per backward of this process, shared by the reducers that take part in it; and the
/// autograd hooks that open it.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/function.h>  // torch 2.11 has no node.h

#include <apex/error.h>

namespace apex::parallel::detail {

class ReducerCore;

// Note [One backward, all its reducers]
//
// A backward may reach the outputs of several reducers, one after the other. If each began only at
// its own output, an exception before that output would leave the other ranks waiting for it. Ranks
// may reach the outputs in a different order and raise at different places, but all have the same
// reducers in the graph. So the first output that a backward reaches begins the backward for every
// reducer with an output in the graph, in the order of construction, which is the same on every
// rank. If reducers share a parameter, the one constructed last owns it from then on.
//
// The reducers also end together: all send their remaining buckets and reports before the first one
// waits. If a rank's backward does not include one of the reducers, that rank is in another step,
// which the reports of the other reducers show. So a rank that waits for one reducer also checks
// the reports of the others.
//
// If an exception is raised before backward reaches any output, no reducer has begun a backward.

// Note [Several reducers on one channel]
//
// Reducers on one NCCL communicator share the order of its collectives. Communication hooks may
// share it as well, because a hook may use any group. Each reducer launches its own buckets in
// order (Note [Order of launches]), but the order in which a backward reaches the layers of several
// reducers may differ by rank: different gradients would be summed without an error. So in a
// backward with several reducers, such a reducer launches its buckets at the end, in the order of
// construction. A reducer with its own channels and no hook launches them during backward.
//
// The participants are known from the first output on. Two kinds of reducers join later, and ranks
// must agree on their order: those that begin with a gradient (because an output was not found, or
// in backward(inputs=...)), and those of a backward inside the backward.

// Note [The end of a backward]
//
// The reduction ends in a final callback of the autograd engine, so that gradients are complete
// when backward() returns. A final callback belongs to the graph task in which it was queued.
// Reentrant checkpointing runs segments of the model in inner graph tasks, whose callbacks would
// run before the outer backward is done. So the first hook of this library that runs queues the
// callback: normally the hook on the model's outputs (watch_outputs), which runs in the outer task;
// the hook of a gradient only if backward did not reach a watched output. If that was in an inner
// graph task, other segments may follow: such a backward is refused.
//
// The callback owns the session. If backward fails, the engine destroys its callbacks without
// running them. The destructor of the session then makes every reducer abandon the backward, so
// that no state remains for the next one.
//
// The hook of an output also runs for autograd.grad(), which computes gradients without
// accumulating them. The engine then has a list of nodes to execute, and a plain backward() has
// none. backward(inputs=...) also has such a list; in that case a reducer begins its backward with
// its first accumulated gradient.

/// The state of one graph task, shared by its reducers. It lives as long as the autograd engine may
/// call back for the task. Thread safe.
class BackwardSession {
 public:
  BackwardSession() = default;
  BackwardSession(const BackwardSession&) = delete;
  BackwardSession& operator=(const BackwardSession&) = delete;
  ~BackwardSession();

  /// Called by autograd when a backward reaches an output of `reached`. Begins the backward for all
  /// reducers of the graph. This thread must not hold the lock of a reducer.
  static void reach(const std::shared_ptr<ReducerCore>& reached);
  /// The session of the graph task that this thread runs. `by_output`: the hook of an output asks.
  static std::shared_ptr<BackwardSession> current(bool by_output = false);

  /// Adds `one` to the participants. Call it with the lock of the reducer held.
  void join(const std::shared_ptr<ReducerCore>& one);
  /// Whether it has more than one participant.
  bool has_several() const { return several_; }
  /// Calls `undo` if the backward fails before all gradients are computed.
  void if_abandoned(std::function<void()> undo);
  /// All gradients are computed. Ends all reducers, then throws the first error of one.
  void end();

  /// Registers a reducer after its construction.
  static void add(const std::shared_ptr<ReducerCore>& reducer);
  using Reducers = std::vector<std::shared_ptr<ReducerCore>>;
  /// All live reducers in the order of construction.
  static Reducers all();

 private:
  Reducers newly_reached(const std::shared_ptr<ReducerCore>& reached);

  std::atomic<bool> several_{false};  ///< more than one participant
  bool by_output_ = false;            ///< the hook of an output opened it
  std::mutex mutex_;                  ///< guards the rest
  std::unordered_set<const ReducerCore*> reached_;
  Reducers participants_;
  std::vector<std::function<void()>> undo_;  ///< see if_abandoned()
};

/// The hook calls gradient_ready() after a parameter's gradient was accumulated.
std::unique_ptr<torch::autograd::FunctionPostHook> make_gradient_hook(
    std::weak_ptr<ReducerCore> core, size_t index);

/// The watched outputs of one reducer. Thread safe. Its mutex is never held during a wait. (It does
/// not use the reducer's mutex, because another thread's backward may hold it while that thread
/// waits for other ranks, which may wait for this rank.)
class WatchedOutputs {
 public:
  /// Hooks `node`: when backward reaches it, BackwardSession::reach() is called. The hook keeps the
  /// reducer alive as long as there may be gradients to synchronize.
  void watch(torch::autograd::Node& node, std::shared_ptr<ReducerCore> core);
  /// Whether an output is among the nodes of a backward.
  bool lie_in(const std::unordered_set<torch::autograd::Node*>& nodes);

 private:
  using Output = torch::autograd::Node* const;  ///< lives as long as its hook

  std::mutex mutex_;  ///< guards the rest
  std::vector<std::weak_ptr<Output>> outputs_;
  size_t most_ = 0;  ///< at this size, expired outputs are removed
};

}  // namespace apex::parallel::detail
