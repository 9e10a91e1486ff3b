// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// One backward of this process, and the reducers that take part in it.

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

/// Another reducer of the same backward has found out that ranks are in different steps: it is not
/// known whether the others come to this one.
class OutOfStepElsewhere final : public RankMismatch {
 public:
  using RankMismatch::RankMismatch;
};

/// A reducer, as a backward sees it. Thread safe.
class BackwardParticipant {
 public:
  virtual ~BackwardParticipant() = default;

  /// Whether an output of this reducer is among the nodes of a backward.
  virtual bool has_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) = 0;
  /// A backward comes through its outputs. First all of them are told that their parameters are
  /// theirs, then each begins, unless it does not synchronize, and joins `session`.
  virtual void own_parameters() = 0;
  virtual void begin(const std::shared_ptr<BackwardSession>& session) = 0;

  /// Whether its messages may travel where those of other reducers do: see Note [Turns].
  virtual bool takes_turns() const = 0;
  /// All gradients are computed. Of several reducers each sends its gradients first, and keeps what
  /// that throws for send().
  virtual void send_gradients(const BackwardSession* session) noexcept = 0;
  /// Sends what is left to send, and what this rank has to say. Does not wait for what others have
  /// to say.
  virtual void send(const BackwardSession* session) = 0;
  /// Waits, and makes gradients averages. `meanwhile` is called now and then, and may throw
  /// OutOfStepElsewhere to end the wait. Does nothing if send() has failed.
  virtual void complete(const BackwardSession* session, const std::function<void()>& meanwhile) = 0;
  /// An exception has ended the backward: sends the others the gradients that they wait for, of
  /// several reducers, and that it failed.
  virtual void abandon_gradients(const BackwardSession* session) noexcept = 0;
  virtual void abandon(const BackwardSession* session) noexcept = 0;

  /// What it waits for in a backward, for ranks that wait for this one; does not block.
  virtual std::string describe() const = 0;

  /// The error, if this backward's ranks are known to be in different steps; else an empty text.
  virtual std::string out_of_step() const = 0;

 private:
  friend class BackwardSession;
  int64_t number_ = 0;  ///< in the order of construction
};

// Note [One backward, all its reducers]
//
// A backward may come through several reducers' outputs, one after the other. If each took part
// only from its own output on, an exception on one rank before that would leave the others waiting
// for this reducer. What a rank uses, in which order, and where it raises, differs; which reducers
// its graph comes through does not. So the first output that a backward reaches begins it for every
// reducer of which an output lies in the graph, in the order of construction, which is the same on
// every rank. Of those that know a parameter, the one constructed last owns it from then on.
//
// They end together, too: all send what is left and their reports, then the first of them waits.
// A rank that has left one of them out of its backward is in another step by the report of some
// other one, which arrives; who waits for the one that was left out looks at those.
//
// An exception in a part of the graph that comes before all outputs is a backward that was not run.

// Note [Turns]
//
// Reducers over one NCCL communicator share the order of its collectives, and so may communication
// hooks, which send by whichever group they like. Each has an order of its
// own (Note [Order of launches]), but where a rank leaves a layer out, its bucket waits for the end
// of backward, and buckets of other reducers would come before it there and after it on other
// ranks: sums of different gradients, without a word. So they take turns: those that were
// constructed last, which backward normally comes to first, launch their buckets first, and none
// launches one before the reducers whose turn is before its own have launched all of theirs. What
// is left is launched at the end, in the same order. Then the reports follow, and buckets that
// carry one, in the order of construction. A reducer with channels of its own and no hook waits for
// nobody.
//
// Who takes part is known from the first output on. One that begins with a gradient (an output that
// was not found, backward(inputs=...)), and a backward inside the backward, come later, and in an
// order that ranks must share.

// Note [The end of a backward]
//
// The reduction ends in a final callback of the autograd engine, so that gradients are complete
// when backward() returns. A final callback belongs to the graph task in which it was queued.
// Reentrant checkpointing runs segments of the model in inner graph tasks, and a callback queued by
// a gradient inside one would run before the outer backward is done. So it is queued from the first
// of our hooks that runs: normally the one on the model's outputs (watch_outputs), which runs in
// the outer task; a gradient's own hook queues it only where backward did not come through a
// watched output.
//
// The callback owns the session. If backward fails the engine destroys its callbacks without
// running them, and the session's destructor has every reducer abandon the backward: there is no
// state to guess about in the next one, whether or not there is one.
//
// An output's hook also runs for autograd.grad(), which computes gradients without accumulating
// any. The engine then has a list of what to execute, and a backward that leaves gradients has
// none; with backward(inputs=...), which has one too, the first gradient that is accumulated opens
// the session.

/// Lives exactly as long as the autograd engine may still call back for one graph task. Thread
/// safe.
class BackwardSession {
 public:
  BackwardSession() = default;
  BackwardSession(const BackwardSession&) = delete;
  BackwardSession& operator=(const BackwardSession&) = delete;
  ~BackwardSession();

  /// Called by autograd when a backward comes to an output of `reached`: begins it for all reducers
  /// of the graph. No reducer may be locked by this thread.
  static void reach(const std::shared_ptr<BackwardParticipant>& reached);
  /// That of the graph task that this thread runs.
  static std::shared_ptr<BackwardSession> current();

  /// `one` takes part from now on. The lock of the reducer is held, as by the next two.
  void join(const std::shared_ptr<BackwardParticipant>& one);
  /// Whether it may launch a bucket before all gradients are computed: see Note [Turns].
  bool is_turn_of(const BackwardParticipant* one);
  /// It has launched all of its buckets.
  void turn_over(const BackwardParticipant* one);
  /// Everything is computed. Throws the first error of a reducer when all have ended.
  void end();

  /// Reducers that may take part, from their construction to their destruction.
  static void add(const std::shared_ptr<BackwardParticipant>& participant);
  static void drop(const BackwardParticipant* participant);
  /// Those that are alive, in the order of construction.
  static std::vector<std::shared_ptr<BackwardParticipant>> all();

 private:
  using Participants = std::vector<std::shared_ptr<BackwardParticipant>>;

  Participants newly_reached(const std::shared_ptr<BackwardParticipant>& reached);

  std::atomic<bool> several_{false};  ///< more than one takes part
  std::mutex mutex_;                  ///< guards the rest
  std::unordered_set<const BackwardParticipant*> reached_;
  std::unordered_set<const BackwardParticipant*> launched_;  ///< those that have launched all
  Participants participants_;
};

}  // namespace apex::parallel::detail
