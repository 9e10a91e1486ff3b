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
// its row when it has launched all its buckets, before it waits for one. If an exception ends the
// backward, the cleanup sends the row. The row contains
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
// StepReport and a position in the row.

// Note [Ranks that are out of step]
//
// The nth synchronized backward of a rank always meets the nth of the others. After an additional
// backward, or one under no_sync(), a rank computes gradients at other parameter values than the
// other ranks. The counts of backwards cannot differ. But the events *between* two synchronized
// backwards can:
//
// - an optimizer stepped twice without a backward in between;
// - an optimizer stepped after a backward that was not synchronized;
// - parameters were updated, or not, since the last synchronized backward;
// - parameters moved further than on other ranks, where the steps of optimizers are not reported:
//   see Note [Writes that bump no version].
//
// Ranks that differ in the first item are out of step. A difference in only the others may be
// harmless (with a sharded optimizer, ranks receive by broadcast what one rank steps). Then ranks
// are out of step if their parameters differ. Every row has a few parameter elements of its rank
// for this comparison. A separate exchange compares all elements after the first differences. The
// more differences were harmless, the less often it runs.
//
// A program may write parameters from gradients of one rank, and undo that later, as
// sharpness-aware minimization does. So if any rank has written parameters after a backward that
// was not synchronized, and no optimizer has reported that as its step, neither updates nor
// distances are compared.
//
// Forwards are not compared. An additional forward (to draw the graph, to evaluate, or to retry
// after an exception) changes no parameter and no gradient. The reducer also does not notice if a
// rank skips a whole batch, with its backward and its optimizer step: the rank's next backward
// meets the next backward of the other ranks, at the same parameters. That rank runs out of batches
// before the others do, which is then detected.

/// The call by which a rank has left the plan.
enum class ReasonToLeave : int64_t {
  kNone,
  kRebuildBuckets,
  kCommHook,
  kParameters,
  kOwner,  ///< another reducer averages some parameters
};

/// Events on a rank since its last synchronized backward.
struct StepFacts {
  bool idle_step = false;        ///< an optimizer stepped twice without a backward in between
  bool updated = false;          ///< parameters were updated
  bool updated_locally = false;  ///< they were, after a backward that was not synchronized
  bool stepped_locally = false;  ///< an optimizer did that
  double moved = 0;              ///< distance that sampled elements have moved; 0: unknown
  int64_t sample = 0;            ///< fingerprint of the sampled elements; 0: unknown
};

/// The row of one rank, without the bits per parameter.
struct StepReport {
  int64_t backward = 0;       ///< number of this synchronized backward, from 1
  bool failed = false;        ///< an exception ended it: the rank sent zeros for the rest
  bool skips = false;         ///< skip_step(): no rank may use a gradient of this backward
  bool without_data = false;  ///< under join(): the rank follows the others
  bool compared = true;       ///< `facts` are compared
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
  bool used(size_t rank, size_t parameter) const;  ///< the rank has a gradient
  /// Which parameters have a gradient on some rank, and which are trainable on the first rank with
  /// data.
  std::vector<uint8_t> used_by_any() const;
  std::vector<bool> trainable_set() const;

  bool any_failed() const;
  bool skipped() const;
  double total_weight() const;  ///< valid if why_refused() is empty
  bool has_digests() const;     ///< all ranks have compared something
  bool same_digests() const;
  bool all_left() const;  ///< of the ranks with data
  bool same_settings() const;

  /// Why this backward is invalid, in the same sentence on every rank; empty if it is valid.
  std::string why_refused(const Names& names) const;

  /// Whether the averaged gradients are from different steps. Only meaningful if why_refused() is
  /// empty.
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
