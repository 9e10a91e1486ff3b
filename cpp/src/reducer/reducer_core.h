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
#include "reducer/watched_outputs.h"
#include "step/backward_session.h"

namespace apex::parallel::detail {

/// The implementation of Reducer. Thread safe, see Note [Who may touch a reducer]. See Reducer for
/// the documentation of functions with the same names.
class ReducerCore final : public BackwardParticipant,
                          public std::enable_shared_from_this<ReducerCore> {
 public:
  ReducerCore(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
              ReducerOptions options);
  ~ReducerCore() override;
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
  /// The same between backwards.
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
  bool has_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) override {
    return outputs_.lie_in(nodes);
  }
  void own_parameters() override;
  void begin(const std::shared_ptr<BackwardSession>& session) override;
  void send(const BackwardSession* session) override;
  void complete(const BackwardSession* session, const std::function<void()>& meanwhile) override;
  void abandon(const BackwardSession* session) noexcept override;
  std::string out_of_step() const override;
  std::string describe() const override;
  /// Called by the hook of a parameter after its gradient was accumulated.
  void gradient_ready(size_t index);

 private:
  using Lock = ReducerContext::Lock;

  ReducerContext& context() const { return state_.context; }

  void hook_parameters();
  void refuse_in_backward(const char* what) const;
  void or_fail(const std::function<void()>& body);
  void fail_backward() noexcept;
  std::unique_ptr<Backward> take_backward() noexcept;

  void begin_backward(const std::shared_ptr<BackwardSession>& session);
  void choose_plan();
  bool begin_at_gradient(size_t index);
  bool launches_at_end() const;
  void forget_cleared_weights();
  void weigh_local_backward(BackwardSession& session);
  bool trains_any() const;

  mutable ReducerState state_;
  WatchedOutputs outputs_;  ///< has its own mutex
  std::atomic<bool> synchronizing_{true};
  std::unique_ptr<Backward> backward_;  ///< in progress
  BackwardSession* session_ = nullptr;  ///< of the backward in progress
  bool shares_channel_ = false;
};

/// All live reducers, in the order of construction; and those that own one of `parameters`. Thread
/// safe.
std::vector<std::shared_ptr<ReducerCore>> all_reducers();
std::vector<std::shared_ptr<ReducerCore>> owners_of(const std::vector<at::Tensor>& parameters);

}  // namespace apex::parallel::detail
