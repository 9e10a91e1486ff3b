// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The step report that each rank sends to the others, as a row of numbers, and the evaluation of
/// the rows of all ranks. Pure, without communication.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace apex::parallel {

// Note [One report per step]
//
// At the end of each synchronized backward every rank sends one row and receives the rows of all
// ranks. So no second exchange is needed, and every rank comes to the same conclusion. A rank sends
// its row when it has launched all its buckets, before it waits for one; if an exception ends the
// backward, the cleanup sends it. The row contains
//
// - whether the backward failed, or the rank skips the step: Notes [Carried through], [Skipped
//   steps];
// - whether the rank has left the bucket plan, and which parameters are trainable on it: Note [One
//   plan];
// - which parameters got a gradient: Note [Parameters that a rank does not use];
// - its first gradient that is not finite, and the weight of its samples, if options request these;
// - a digest of a part of its state: Note [Replicas];
// - and what has happened since its last synchronized backward: Note [Ranks that are out of step].
//
// If ranks must first agree on a plan, another row is sent before that. A new item needs a field of
// StepReport. One that changes in most steps is set only where ReducerContext::reads_reports():
// elsewhere a device would copy the row in every step, and no rank would read it.

// Note [Ranks that are out of step]
//
// The nth synchronized backward of a rank always meets the nth of the others. After an additional
// backward, or one under no_sync(), a rank computes gradients at other parameter values than the
// other ranks. So each row has a fingerprint of 32 elements of the rank's parameters, the distance
// by which they have moved since the last synchronized backward, and the number of optimizer steps
// since then, where the program reports them. If the fingerprints differ, ranks are out of step if
//
// - they have made different numbers of reported steps;
// - the parameters have moved on some ranks only;
// - or they have moved further on some ranks, where steps are not reported: libtorch's optimizers
//   have no step hooks.
//
// A program may write parameters itself. Other values on each rank, such as noise, prove nothing: a
// difference that lasts is found by the comparison of replicas. So distances are not compared where
// steps are reported. A program may also write parameters from gradients of one rank, and undo that
// later, as sharpness-aware minimization does. So only the reported steps are compared if the
// parameters of any rank have moved after a backward that was not synchronized.
//
// Forwards are not compared: an additional one (to draw the graph, to evaluate, or to retry after
// an exception) changes no parameter and no gradient. Nor is it noticed if a rank skips a whole
// batch, with its backward and its step: its next backward meets the next one of the others, at the
// same parameters. That rank runs out of batches before the others do, which is then detected.

/// The call by which a rank has left the plan.
enum class ReasonToLeave : int16_t {
  kNone,
  kRebuildBuckets,
  kCommHook,
  kParameters,
  kOwner,  ///< another reducer averages some parameters
};

/// What has happened on a rank since its last synchronized backward, as this one begins.
struct StepFacts {
  int64_t steps = 0;             ///< of optimizers, as reported
  double moved = 0;              ///< distance that the sampled elements have moved
  int64_t sample = 0;            ///< fingerprint of the sampled elements; 0: unknown
  bool written = false;          ///< a parameter was written, perhaps with the same values
  bool local = false;            ///< they moved after a backward that was not synchronized
  bool stepped_locally = false;  ///< an optimizer reported a step after such a backward
  bool compared = true;          ///< all this is compared
  bool measured = true;          ///< and so is `moved`
  bool unused[3] = {};           ///< so that rows have no padding
};

/// The row of one rank, without the bits per parameter. It is sent as it lies in memory.
struct StepReport {
  bool failed = false;           ///< an exception ended it: the rank sent zeros for the rest
  bool skips = false;            ///< skip_step(): no rank may use a gradient of this backward
  bool without_data = false;     ///< under join(): the rank has run out of data
  bool followed = false;         ///< it has taken part in an earlier backward without data
  bool ends_early = false;       ///< under join(): throw_on_early_termination
  bool keeps_gradients = false;  ///< under join(): it added a gradient to the last average
  ReasonToLeave left = ReasonToLeave::kNone;  ///< why it has left the plan and sent zeros
  StepFacts facts;
  int64_t settings = 0;     ///< fingerprint of the settings that may change between backwards
  double weight = 0;        ///< of its samples; see Note [Weighted means]
  int64_t non_finite = -1;  ///< the first parameter with a gradient that is not finite
  int64_t digest = 0;       ///< of the part of its state that is compared; 0: none
};

/// The rows of all ranks. A value type.
class StepTable {
 public:
  static size_t row_size(size_t parameters);
  /// Writes a row [row_size(used.size())].
  /// @param used       by parameter: whether this rank has a gradient.
  /// @param trainable  by parameter.
  static void encode(const StepReport& report, const std::vector<uint8_t>& used,
                     const std::vector<bool>& trainable, int64_t* row);

  using Names = std::function<std::string(size_t parameter)>;

  StepTable() = default;
  /// @param rows  [ranks * row_size(parameters)].
  StepTable(std::vector<int64_t> rows, size_t ranks, size_t parameters);

  const StepReport& of(size_t rank) const { return reports_[rank]; }
  bool trainable(size_t rank, size_t parameter) const;
  /// Which parameters have a gradient on some rank, and which are trainable on the first rank with
  /// data.
  std::vector<uint8_t> used_by_any() const;
  std::vector<bool> trainable_set() const;

  bool any_failed() const;
  bool skipped() const;
  double total_weight() const;  ///< valid if why_refused() is empty
  bool has_digests() const;     ///< all ranks have compared something
  bool same_digests() const;
  int64_t ranks_with_data() const;
  /// If no rank has data: the first rank that had data to the end; -1 if all had.
  int64_t last_with_data() const;
  bool all_left() const;  ///< of the ranks with data
  bool same_settings() const;

  /// Why this backward is invalid, in the same sentence on every rank; empty if it is valid.
  std::string why_refused(const Names& names) const;

  /// How the ranks are out of step, so that gradients of different steps were averaged; empty if
  /// they are not known to be. Only meaningful if why_refused() is empty.
  std::string describe_difference() const;
  /// Whether an optimizer of each rank has stepped after a backward that was not synchronized.
  bool all_stepped_locally() const;

  /// "rank 1 contributed ... for parameter 'a'", or empty.
  std::string describe_non_finite(const Names& names) const;

 private:
  const int64_t* bits_of(size_t rank) const;
  bool used_any(size_t rank) const;
  std::string describe_sets(const Names& names) const;
  std::string describe_weights() const;
  std::string describe_join() const;

  std::vector<int64_t> rows_;
  std::vector<StepReport> reports_;  ///< by rank
  size_t parameters_ = 0;
};

}  // namespace apex::parallel
