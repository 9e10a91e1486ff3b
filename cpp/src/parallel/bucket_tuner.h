#pragma once

#include <cstdint>
#include <vector>

#include <apex/parallel/bucket_assignment.h>

namespace apex::parallel {

/// Tries plans in turn, a few backwards each, and keeps the fastest. Knows nothing of ranks: each rank has
/// one, fed with the same candidates; what they measured is compared by the caller.
///
///     observe -> (caller proposes candidates) -> try each
///             -> (caller says which was fastest) -> keep -> ...
class BucketTuner {
 public:
  enum class Phase { kObserve, kTry, kKeep };
  enum class Ask {
    kNothing,
    kPropose,  ///< enough was observed: call propose() with the plans to try
    kSwitch,   ///< put candidate() into force
    kDecide,   ///< all were tried: agree on medians() and call decide()
  };

  /// Backwards with one plan; the first of them, which allocates, is not counted.
  static constexpr int64_t kSteps = 6;
  /// Backwards after which times are observed anew.
  static constexpr int64_t kPatience = 1000;

  /// A plan was learnt or changed: what was measured is worth nothing.
  void reset(size_t parameters);

  /// `plan` was measured in another run: kept without trying others.
  void keep(const BucketPlan& plan);

  /// Whether gradient_at() is wanted in this backward.
  bool observing() const { return phase_ == Phase::kObserve && steps_ > 0; }
  /// `seconds` after the begin of backward, the gradient of `parameter` was ready.
  void gradient_at(size_t parameter, double seconds);
  /// A backward took so long, from its begin to its last gradient reduced.
  Ask backward_took(double seconds);

  /// Median of when each gradient was ready; 0 for one that was not.
  std::vector<double> ready_s() const;
  /// candidates[0] is the plan in force, whose times were observed already. Returns kSwitch, or kDecide
  /// if there is no other.
  Ask propose(std::vector<BucketPlan> candidates);
  const BucketPlan& candidate() const { return candidates_[current_]; }
  const std::vector<BucketPlan>& candidates() const { return candidates_; }
  /// Median seconds of each candidate.
  std::vector<double> medians() const;
  /// Keeps the candidate with the least of these seconds; the one that was in force before, unless another
  /// is faster by more than what a few backwards can tell apart, 3 %.
  void decide(const std::vector<double>& seconds);

  Phase phase() const { return phase_; }

 private:
  Phase phase_ = Phase::kObserve;
  int64_t steps_ = 0;
  std::vector<std::vector<double>> ready_;  ///< [parameter][backward]
  std::vector<BucketPlan> candidates_;
  std::vector<std::vector<double>> times_;  ///< [candidate][backward]
  size_t current_ = 0;
};

}  // namespace apex::parallel
