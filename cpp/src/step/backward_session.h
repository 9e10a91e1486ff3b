// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A session per backward of this process, shared by the reducers that take part in it.

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

class BackwardSession;

/// Thrown if another reducer of the same backward has found that ranks are in different steps. Then
/// it is unknown whether the other ranks reach this reducer.
class OutOfStepElsewhere final : public RankMismatch {
 public:
  using RankMismatch::RankMismatch;
};

/// The interface of a reducer to a backward. Thread safe.
class BackwardParticipant {
 public:
  virtual ~BackwardParticipant() = default;

  /// Whether an output of this reducer is among the nodes of a backward.
  virtual bool has_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) = 0;
  /// A backward reaches the outputs of this reducer. First own_parameters() is called for all
  /// reducers, then begin(). A reducer that synchronizes then joins `session`.
  virtual void own_parameters() = 0;
  virtual void begin(const std::shared_ptr<BackwardSession>& session) = 0;

  /// All gradients are computed. Sends the remaining buckets and this rank's report. Does not wait
  /// for the reports of others.
  virtual void send(const BackwardSession* session) = 0;
  /// Waits, and replaces gradients by averages. `meanwhile` is called periodically, and may throw
  /// OutOfStepElsewhere to end the wait. Does nothing if send() has failed.
  virtual void complete(const BackwardSession* session, const std::function<void()>& meanwhile) = 0;
  /// An exception has ended the backward. Sends what other ranks wait for, and reports the failure.
  virtual void abandon(const BackwardSession* session) noexcept = 0;

  /// Reports what this reducer waits for to ranks that wait for this rank. Does not block.
  virtual std::string describe() const = 0;

  /// The error text if the ranks are known to be in different steps, else an empty text.
  virtual std::string out_of_step() const = 0;

 private:
  friend class BackwardSession;
  int64_t number_ = 0;  ///< in the order of construction
};

// Note [One backward, all its reducers]
//
// A backward may reach the outputs of several reducers, one after the other. If each reducer took
// part only from its own output on, an exception on one rank before that output would leave the
// other ranks waiting for that reducer. Ranks may use different parameters in a different order,
// and may raise at different places. But all ranks have the same set of reducers in the graph. So
// the first output that a backward reaches begins the backward for every reducer with an output in
// the graph. It does so in the order of construction, which is the same on every rank. If reducers
// share a parameter, the one constructed last owns it from then on.
//
// The reducers also end together: all of them send their remaining buckets and their reports before
// the first of them waits. If a rank's backward does not include one of the reducers, that rank is
// in another step. The reports of the other reducers show this. So a rank that waits for one
// reducer also checks the reports of the others.
//
// If an exception is raised before backward reaches any output, no reducer has begun a backward.

// Note [Several reducers on one channel]
//
// Reducers on one NCCL communicator share the order of its collectives. Communication hooks may
// share it as well, because a hook may use any group. Each reducer launches its own buckets in
// order (Note [Order of launches]). But the order in which a backward reaches the layers of several
// reducers may differ by rank. Then different gradients would be summed without an error. So such
// reducers launch their buckets at the end of a backward that has several reducers, in the order of
// construction. A reducer with its own channels and no hook launches them during backward.
//
// The participants are known from the first output on. Two kinds of reducers join later: reducers
// that begin with a gradient (because an output was not found, or in backward(inputs=...)), and
// reducers of a backward inside the backward. Ranks must agree on the order of these.

// Note [The end of a backward]
//
// The reduction ends in a final callback of the autograd engine, so that gradients are complete
// when backward() returns. A final callback belongs to the graph task in which it was queued.
// Reentrant checkpointing runs segments of the model in inner graph tasks. A callback queued by a
// gradient in an inner task would run before the outer backward is done. So the first hook of this
// library that runs queues the callback. Normally that is the hook on the model's outputs
// (watch_outputs), which runs in the outer task. The hook of a gradient queues it only if backward
// did not reach a watched output.
//
// The callback owns the session. If backward fails, the engine destroys its callbacks without
// running them. The destructor of the session then makes every reducer abandon the backward, so
// that no state remains for the next one.
//
// The hook of an output also runs for autograd.grad(), which computes gradients without
// accumulating them. The engine then has a list of nodes to execute, and a plain backward() has
// none. backward(inputs=...) also has such a list; in that case the first accumulated gradient
// opens the session.

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
  static void reach(const std::shared_ptr<BackwardParticipant>& reached);
  /// The session of the graph task that this thread runs.
  static std::shared_ptr<BackwardSession> current();

  /// Adds `one` to the participants. Call it with the lock of the reducer held.
  void join(const std::shared_ptr<BackwardParticipant>& one);
  /// Whether it has more than one participant.
  bool has_several() const { return several_; }
  /// Calls `undo` if the backward fails before all gradients are computed.
  void if_abandoned(std::function<void()> undo);
  /// All gradients are computed. Ends all reducers, then throws the first error of one.
  void end();

  /// Registers a reducer after its construction; drop() unregisters it at its destruction.
  static void add(const std::shared_ptr<BackwardParticipant>& participant);
  static void drop(const BackwardParticipant* participant);
  /// All live reducers in the order of construction.
  static std::vector<std::shared_ptr<BackwardParticipant>> all();

 private:
  using Participants = std::vector<std::shared_ptr<BackwardParticipant>>;

  Participants newly_reached(const std::shared_ptr<BackwardParticipant>& reached);

  std::atomic<bool> several_{false};  ///< more than one participant
  std::mutex mutex_;                  ///< guards the rest
  std::unordered_set<const BackwardParticipant*> reached_;
  Participants participants_;
  std::vector<std::function<void()>> undo_;  ///< see if_abandoned()
};

}  // namespace apex::parallel::detail
