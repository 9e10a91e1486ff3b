// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The implementation of Reducer: its lifecycle between backwards, and the functions that autograd
/// calls. docs/design.md gives an overview.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <apex/parallel/reducer.h>

#include "reducer/backward.h"
#include "reducer/backward_session.h"

namespace apex::parallel::detail {

/// The implementation of Reducer. Thread safe, see Note [Who may touch a reducer]. See Reducer for
/// the documentation of functions with the same names.
class ReducerCore final : public std::enable_shared_from_this<ReducerCore> {
 public:
  ReducerCore(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
              ReducerOptions options);
  /// Compares models, connects, broadcasts, and hooks the parameters. Collective.
  void begin();
  /// Gives the parameters up, once a backward in progress has ended.
  void retire() { context().parameters.retire(); }

  // Called by the user.
  void prepare_for_forward();
  void watch_outputs(const std::vector<at::Tensor>& outputs);
  std::atomic<bool>& synchronizing() { return synchronizing_; }
  void release();
  std::vector<at::Tensor> buffers();
  /// The state without the lock, for its constant and atomic members.
  ReducerState& state() { return state_; }
  /// Calls `body(state)` with the lock. Waits for a backward of another thread.
  template <typename Body>
  auto locked(Body&& body) {
    const Lock lock(context().mutex);
    return body(state_);
  }
  /// The same between backwards. Does not wait for a backward, which may hold the lock for long.
  /// @throws apex::Error in a backward; the message names `what`.
  template <typename Body>
  void between_backwards(const char* what, Body&& body) {
    refuse_in_backward(what);
    const Lock lock(context().mutex);
    refuse_in_backward(what);
    body(state_);
  }
  /// Makes the next backward record a new plan. Call it in between_backwards().
  void leave_plan(ReasonToLeave reason);
  const std::vector<NamedTensor>& parameters() const { return context().parameters.named(); }
  /// A backward without autograd, of a rank without data: see Note [Uneven inputs]. Throws the same
  /// errors as backward().
  void shadow_backward();

  // Called by autograd.
  /// Whether an output of this reducer is among the nodes of a backward.
  bool has_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) {
    return outputs_.lie_in(nodes);
  }
  /// A backward reaches the outputs of this reducer. First own_parameters() is called for all
  /// reducers, then begin(). A reducer that synchronizes then joins `session`.
  void own_parameters();
  void begin(const std::shared_ptr<BackwardSession>& session);
  /// All gradients are computed. Sends the remaining buckets and this rank's report. Does not wait
  /// for the reports of others.
  void send(const BackwardSession* session);
  /// Waits, and replaces gradients by averages. `meanwhile` is called periodically, and may throw
  /// to end the wait. Does nothing if send() has failed.
  void complete(const BackwardSession* session, const std::function<void()>& meanwhile);
  /// An exception has ended the backward. Sends what other ranks wait for, and reports the failure.
  void abandon(const BackwardSession* session) noexcept;
  /// The error text if the ranks are known to be in different steps, else an empty text.
  std::string out_of_step() const;
  /// Reports what this reducer waits for to ranks that wait for this rank. Does not block.
  std::string describe() const;
  /// Called by the hook of a parameter after its gradient was accumulated.
  void gradient_ready(size_t index);

 private:
  friend class BackwardSession;
  using Lock = ReducerContext::Lock;

  ReducerContext& context() const { return state_.context; }

  void hook_parameters();
  void refuse_in_backward(const char* what) const;
  void or_fail(const std::function<void()>& body);
  void fail_backward() noexcept;
  std::unique_ptr<Backward> take_backward() noexcept;

  void begin_backward(const std::shared_ptr<BackwardSession>& session);
  void forget_cleared_weights(const Parameter* arrived = nullptr);
  void weigh_local_backward(BackwardSession& session);

  mutable ReducerState state_;
  WatchedOutputs outputs_;  ///< has its own mutex
  std::atomic<bool> synchronizing_{true};
  std::unique_ptr<Backward> backward_;  ///< in progress
  BackwardSession* session_ = nullptr;  ///< of the backward in progress
  int64_t number_ = 0;                  ///< in the order of construction
};

}  // namespace apex::parallel::detail
