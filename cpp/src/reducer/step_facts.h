// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What each rank tells the others about the step that it is in, so that a rank that is out of step
/// is noticed in the first backward in which its gradients meet those of another step.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace apex::parallel {

// Note [Ranks that are out of step]
//
// The nth synchronized backward of a rank always meets the nth of the others. After one more, or
// one under no_sync(), a rank computes gradients at other parameters than the others do. The counts
// of backwards cannot differ; what happened *between* two synchronized backwards can:
//
// - an optimizer that stepped twice without a backward between: a step without a gradient;
// - parameters that were updated, or not, since the last synchronized backward;
// - parameters that were updated after a backward that was not synchronized;
// - parameters that moved further than on other ranks, where the steps of optimizers are not
//   reported: see Note [Writes that move no version].
//
// Each is put as a number behind the gradients of the last bucket, one-hot, so that the sum over
// ranks tells which answers there were. If there is more than one answer, every rank has read the
// same sum, and all exchange who said what in a second, small message. Ranks that differ in the
// first are out of step. A difference in the last three alone may be harmless (a sharded optimizer
// steps what others receive as a broadcast), so then the parameters decide: out of step are ranks
// whose parameters differ.
//
// Forwards are not compared. An additional forward (to draw the graph, to evaluate, to try again
// after an exception) changes no parameter and no gradient. A rank that leaves out a batch, with
// its backward and its optimizer step, looks the same to the reducer: its next backward meets the
// one that the others are in, at the same parameters. That rank runs out of batches before the
// others do, which is found then.
//
// The same numbers report that a rank cannot do, in this backward, what the others expect: it
// failed (an exception ended its backward), it left the plan, or it skips the step. See Notes
// [Carried through] and [Skipped steps].

/// Facts about one rank, at the time at which it launches its last bucket.
struct StepFacts {
  bool wants_rebuild = false;    ///< parameters were frozen or unfrozen on this rank
  bool failed = false;           ///< an exception ended its backward: what it sends are zeros
  bool left_plan = false;        ///< it wants to agree on a new plan: what it sends are zeros
  bool skips = false;            ///< skip_step(): no rank is to use a gradient of this backward
  bool compared = true;          ///< the facts below count; not under join()
  bool idle_step = false;        ///< an optimizer stepped twice without a backward between
  bool updated = false;          ///< parameters were updated since the last synchronized backward
  bool updated_locally = false;  ///< and that after a backward that was not synchronized
  double moved = 0;              ///< how far elements of the parameters have; 0: no answer

  /// How many numbers encode() makes use of.
  static constexpr int kCount = 19;

  /// Bit i is number i behind the gradients. A rank that failed or is not compared gives no
  /// answers.
  uint32_t encode() const;
};

/// What the ranks have said together.
class SeenFacts {
 public:
  explicit SeenFacts(uint32_t bits) : bits_(bits) {}

  bool rebuild_wanted() const;
  bool failed() const;
  bool skipped() const;
  bool plan_left() const;  ///< by some rank
  bool plan_kept() const;  ///< by some rank
  /// Whether ranks must exchange who said what.
  bool differ() const { return failed() || (plan_left() && plan_kept()) || answers_differ(); }

 private:
  bool answers_differ() const;
  uint32_t bits_;
};

/// One rank's row in the exchange that follows.
struct StepDetails {
  StepFacts facts;
  int64_t backward = 0;      ///< number of this synchronized backward, from 1
  bool hook_failed = false;  ///< the exception came from its communication hook
  int64_t reason = 0;        ///< why it left the plan: an index into kReasonsToLeave
  int64_t digest = 0;        ///< of its parameters, where that was asked for

  static constexpr int kFields = 5;
  std::vector<int64_t> encode() const;
  static StepDetails decode(const int64_t* fields);
};

/// What a rank has called to leave the plan.
extern const char* const kReasonsToLeave[];
enum class ReasonToLeave : int64_t {
  kNone,
  kRelearn,
  kCommHook,
  kPlan,
  kDeferred,
  kParameters,
  kFrozen
};

/// Whether the communication hook failed on some ranks, but not on all: what hooks send does not
/// match any more.
bool hooks_are_apart(const std::vector<StepDetails>& ranks);

/// Whether the parameters have to be compared to tell if these ranks are out of step.
bool needs_digests(const std::vector<StepDetails>& ranks);

/// The error of `rank`, or empty if the difference is harmless. Names the ranks and what they did.
std::string describe_difference(int rank, const std::vector<StepDetails>& ranks);

}  // namespace apex::parallel
