// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Measures norms of gradients: those of this rank when they are packed, and the reduced ones when
/// they are handed out.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/parallel/gradient_statistics.h>

#include "reducer/plan.h"
#include "step/gradient_history.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

/// Sums of squares by parameter, see MessageOptions::measure_own. Not thread safe.
class GradientMeter {
 public:
  explicit GradientMeter(ReducerContext& context) : context_(context) {}

  /// Call it when all gradients of this rank are packed. Fills in `report`, with check_finite and
  /// gradient_statistics. Waits for a device.
  void measure_own(const std::vector<PlannedBucket>& entries, StepReport& report);
  /// With gradient_statistics: adds the measurements of the reductions. Call it when all buckets
  /// are complete, before the plan is extended, which makes new messages.
  void read_kept(const std::vector<PlannedBucket>& entries, const StepTable& table);
  /// With gradient_statistics: adds reduced gradients that are complete.
  void add_reduced(const std::vector<BucketMessage::Slot>& slots, int64_t bucket);
  /// Call it when all reduced gradients are complete. With `skipped` they are ignored. Waits for a
  /// device.
  void conclude(const StepTable& table, bool skipped);

  /// The norm from conclude(), if no gradient has changed since. Empty on devices, where the check
  /// would take as long as the norm.
  std::optional<double> norm() const;
  const GradientStatistics& statistics() const { return history_.last(); }
  std::vector<ParameterNorms> norms() const;

 private:
  void read_devices();
  int64_t sample(size_t parameter) const;

  ReducerContext& context_;
  std::vector<double> own_;      ///< by parameter
  std::vector<double> reduced_;  ///< by parameter
  std::vector<double> kept_;     ///< by rank: of the parts that ranks sum themselves
  std::vector<int64_t> buckets_;
  std::vector<int64_t> on_device_;  ///< parameters whose `values_` are not measured yet
  std::vector<at::Tensor> values_;
  std::vector<ParameterNorms> norms_;  ///< of the last backward that was concluded
  std::vector<int64_t> samples_;       ///< of the gradients of that backward: see sample()
  GradientHistory history_;
};

}  // namespace apex::parallel::detail
