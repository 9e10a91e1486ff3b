// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// How large gradients are: this rank's as they go into buckets, and the reduced ones as they come
/// out.

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

  /// All of this rank's are in their buckets: says so in `report`, with check_finite and
  /// gradient_statistics. Waits for a device.
  void measure_own(const std::vector<PlannedBucket>& entries, StepReport& report);
  /// With gradient_statistics: these are complete.
  void add_reduced(const std::vector<BucketMessage::Slot>& slots, int64_t bucket);
  /// And all are. `skipped`: they do not count. Waits for a device.
  void conclude(const std::vector<PlannedBucket>& entries, const StepTable& table, bool skipped);

  /// The norm of conclude(), if all gradients are still those. Nothing on devices, where it would
  /// take as long to look.
  std::optional<double> norm() const;
  const GradientStatistics& statistics() const { return history_.last(); }
  std::vector<ParameterNorms> norms() const;

 private:
  void read_devices();
  int64_t sample(size_t parameter) const;

  ReducerContext& context_;
  std::vector<double> own_;      ///< by parameter
  std::vector<double> reduced_;  ///< by parameter
  std::vector<int64_t> buckets_;
  std::vector<int64_t> on_device_;  ///< parameters whose `values_` are to be measured
  std::vector<at::Tensor> values_;
  std::vector<ParameterNorms> norms_;  ///< of the last backward that was concluded
  std::vector<int64_t> samples_;       ///< of its gradients: see sample()
  GradientHistory history_;
};

}  // namespace apex::parallel::detail
