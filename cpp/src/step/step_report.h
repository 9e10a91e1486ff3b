// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What each rank tells the others about a step: a row of numbers per rank, and what the rows of
/// all ranks mean together. Pure: knows no communication.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "step/step_times.h"

namespace apex::parallel {

// Note [One report per step]
//
// At the end of each synchronized backward every rank sends one row, and sees those of all: so who
// said what needs no second question, and every rank comes to the same conclusion. The row is sent
// when all buckets of this rank are on their way, before anything is waited for; or, when an
// exception ends the backward, by whoever cleans up behind it. It says
//
// - whether the backward failed, or the rank skips the step: Notes [Carried through], [Skipped
//   steps];
// - whether the rank has left the bucket plan, and which parameters are trainable on it: Note [One
//   plan per set];
// - which parameters got a gradient: Note [Parameters that a rank does not use];
// - its first gradient that is not finite, the weight of its samples, and the size of its gradient,
//   where that is asked for;
// - a digest of a part of its state: Note [Replicas];
// - what has happened since its last synchronized backward: Note [Ranks that are out of step];
// - and how long its own part of that took: Note [Whose time it is].
//
// Where ranks have yet to agree on a plan, another row goes ahead of that. A new thing to say is a
// field of StepReport and a place in the row.

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
// Ranks that differ in the first are out of step. A difference in the last three alone may be
// harmless (a sharded optimizer steps what others receive as a broadcast), so then the parameters
// decide: out of step are ranks whose parameters differ. A few elements of each rank are compared
// in every row; all elements, in an exchange of their own, in the first differences, and less often
// the more of them were harmless.
//
// Forwards are not compared. An additional forward (to draw the graph, to evaluate, to try again
// after an exception) changes no parameter and no gradient. A rank that leaves out a batch, with
// its backward and its optimizer step, looks the same to the reducer: its next backward meets the
// one that the others are in, at the same parameters. That rank runs out of batches before the
// others do, which is found then.

/// What a rank has called to leave the plan.
enum class ReasonToLeave : int64_t {
  kNone,
  kRelearn,
  kCommHook,
  kPlan,
  kDeferred,
  kParameters,
  kSet,  ///< other parameters are trainable
};

/// What happened on a rank since its last synchronized backward.
struct StepFacts {
  bool idle_step = false;        ///< an optimizer stepped twice without a backward between
  bool updated = false;          ///< parameters were updated
  bool updated_locally = false;  ///< and that after a backward that was not synchronized
  double moved = 0;              ///< how far elements of the parameters have; 0: no answer
  int64_t sample = 0;            ///< fingerprint of these elements; 0: no answer
};

/// One rank's row, without its bits.
struct StepReport {
  int64_t backward = 0;       ///< number of this synchronized backward, from 1
  bool failed = false;        ///< an exception ended it: what the rank still had to send are zeros
  bool hook_failed = false;   ///< the exception came from its communication hook
  bool skips = false;         ///< skip_step(): no rank is to use a gradient of this backward
  bool without_data = false;  ///< under join(): the rank follows the others
  bool compared = true;       ///< the facts count
  ReasonToLeave left = ReasonToLeave::kNone;  ///< why it has left the plan: it sent zeros by that
  StepFacts facts;
  int64_t settings = 0;     ///< fingerprint of those that may change between backwards
  double weight = 0;        ///< of its samples; see Note [Weighted means]
  int64_t non_finite = -1;  ///< the first parameter with a gradient that is not finite
  double squares = 0;       ///< sum of squares of its gradient, as far as it was measured by then
  int64_t digest = 0;       ///< of the part of its state that is compared now; 0: none is
  detail::StepTimes times;  ///< see Note [Whose time it is]
};

/// The rows of all ranks. A value.
class StepTable {
 public:
  /// Elements of one row.
  static size_t row_size(size_t parameters);
  /// Writes a row [row_size(used.size())].
  /// @param used       by parameter: this rank has a gradient.
  /// @param trainable  by parameter.
  static void encode(const StepReport& report, const std::vector<uint8_t>& used,
                     const std::vector<bool>& trainable, int64_t* row);

  /// The name of a parameter.
  using Names = std::function<std::string(size_t parameter)>;

  StepTable() = default;
  /// @param rows  [ranks * row_size(parameters)].
  StepTable(std::vector<int64_t> rows, size_t ranks, size_t parameters);

  const StepReport& of(size_t rank) const { return reports_[rank]; }
  std::vector<detail::StepTimes> times() const;  ///< by rank; not known of one without data
  bool trainable(size_t rank, size_t parameter) const;
  /// Which parameters have a gradient on some rank; and are trainable on the first one with data.
  std::vector<uint8_t> used_by_any() const;
  std::vector<bool> trainable_set() const;

  bool any_failed() const;
  bool skipped() const;
  double total_weight() const;  ///< where it is not refused
  bool same_digests() const;    ///< of those that have one
  bool all_left() const;        ///< of the ranks with data
  bool all_left_for(ReasonToLeave reason) const;
  bool same_settings() const;
  /// The communication hook failed on some ranks, but not on all: what hooks send does not match
  /// any more.
  bool hooks_apart() const;

  /// Why nothing of this backward counts, the same sentence for every rank; empty: it does.
  std::string why_refused(const Names& names) const;

  /// Why the gradients that were averaged are not of one step. Not asked where it is refused.
  enum class Difference {
    kNone,
    kUnknown,  ///< out of step if any element of the parameters differs
    kCertain,
  };
  Difference difference() const;
  std::string describe_difference() const;

  /// "rank 1 contributed ... for parameter 'a'", or empty.
  std::string describe_non_finite(const Names& names) const;

 private:
  const int64_t* bits_of(size_t rank) const;
  bool used_any(size_t rank) const;
  std::string describe_sets(const Names& names) const;
  std::string describe_weights() const;

  std::vector<int64_t> rows_;
  std::vector<StepReport> reports_;  ///< by rank
  size_t parameters_ = 0;
};

}  // namespace apex::parallel
