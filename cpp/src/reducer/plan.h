// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A bucket plan: the gradients in each bucket, the order of the buckets, and their reductions; how
/// it is recorded; and the plan of a reducer, with the reason why a rank has left it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <apex/parallel/detail/bucket_assignment.h>

#include "reducer/planned_bucket.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

/// The position of a parameter in a plan, and its properties when the plan was agreed on.
struct Place {
  int64_t bucket = -1;     ///< index into the plan's entries; -1: none
  size_t slot = 0;         ///< its slot in that bucket
  int32_t expected = 1;    ///< times it fires per backward, as recorded by this rank
  bool demanded = false;   ///< on demand, and reduced in a backward of this plan
  int64_t sparse_dim = 0;  ///< number of sparse dimensions of its gradient; 0: dense

  /// A sparse gradient is in no bucket; see Backward::reduce_sparse().
  bool is_sparse() const { return sparse_dim != 0; }
  /// Whether its gradient was recorded. Others are reduced on demand.
  bool is_planned() const { return bucket >= 0 || is_sparse(); }
};

struct Plan {
  std::vector<Place> places;  ///< by parameter
  BucketPlan buckets;
  std::vector<PlannedBucket> entries;  ///< by bucket
  /// Buckets of parameters that no rank used when the plan was recorded. They are launched after
  /// the reports, if a rank has a gradient.
  std::vector<PlannedBucket> on_demand;
  bool carries_report = false;   ///< the report follows the gradients of the last bucket
  bool watches_demand = false;   ///< buckets on demand may get a gradient
  bool has_sparse = false;       ///< some gradients are sparse
  bool holds_gradients = false;  ///< its messages are those of the last backward
  int64_t kinds = 0;             ///< of the parameters, see ParameterTable

  /// The number of buckets before the report.
  size_t plain_buckets() const { return entries.size() - (carries_report ? 1 : 0); }
  /// Whether a gradient of the parameter was reduced by this plan, or is expected to be.
  bool has(size_t parameter) const {
    return places[parameter].is_planned() || places[parameter].demanded;
  }
  template <typename Predicate>
  bool any_planned(Predicate&& holds) const {
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i].is_planned() && holds(i)) return true;
    }
    return false;
  }
  /// Names the gradients that the next bucket waits for.
  std::string describe_next(const BackwardPass& pass, const ReducerContext& context) const;
  void reset();
  /// Prepares a backward in which these parameters are trainable: no bucket waits for the others.
  void expect(const std::vector<bool>& trainable, bool static_graph);
};

// Note [One plan]
//
// A reducer has one plan, with a place for every parameter. For a frozen or unused one, a rank
// sends the gradient that it holds, or zeros. So no message depends on the set of trainable
// parameters, and a program that alternates between two sets has one plan for both.
//
// A gradient of a parameter that was frozen, or not used on any rank, when the plan was recorded is
// reduced on demand. The next backward then records a plan that also has the parameters of the old
// one. If parameters stay frozen for kKeptFor backwards, a plan without them is recorded. Every
// rank decides both from the same reports, so all ranks record in the same backward.
//
// All ranks must freeze and unfreeze the same parameters. The reports contain the set of each rank,
// so a difference is an error on every rank, except on devices on which ranks do not read each
// other's reports.

/// The plan of a reducer. Not thread safe.
class PlanBook {
 public:
  explicit PlanBook(ReducerContext& context) : context_(context) {}

  /// The current plan; null if a plan must be recorded.
  Plan* current() { return left_ == ReasonToLeave::kNone ? plan_.get() : nullptr; }
  const Plan* current() const { return const_cast<PlanBook*>(this)->current(); }

  void forget();
  /// This rank leaves the plan; the other ranks may still use it.
  void leave(ReasonToLeave reason);
  ReasonToLeave left() const { return left_; }
  /// The plan by which this rank sends messages, perhaps because others may use it although this
  /// rank has left it; null if there is none.
  Plan* sends_by() {
    return left_ == ReasonToLeave::kNone || context_.reads_reports() ? plan_.get() : nullptr;
  }
  /// Before a backward with this set of trainable parameters: leaves the plan, or prepares it.
  /// @param follows  this rank has no data and does what the others do.
  void choose(const std::vector<bool>& trainable, bool follows);
  /// Makes a plan, the same on every rank, from the gradients of a backward. Collective.
  void record(const BackwardPass& pass, const std::vector<bool>& trainable);
  /// A backward with the current plan has ended. The argument is the same on every rank.
  void served(const std::vector<bool>& trainable);

 private:
  enum class Next { kSame, kLarger, kSmaller };
  void fill(std::vector<Place> places, const std::vector<int64_t>& order);

  ReducerContext& context_;
  std::unique_ptr<Plan> plan_;
  ReasonToLeave left_ = ReasonToLeave::kNone;
  Next next_ = Next::kSame;         ///< the plan of the next backward
  std::unique_ptr<Plan> extended_;  ///< the next plan also has its parameters
  std::vector<bool> set_;           ///< of the last backward
  int64_t same_for_ = 0;            ///< number of backwards with this set before that one
};

}  // namespace apex::parallel::detail
