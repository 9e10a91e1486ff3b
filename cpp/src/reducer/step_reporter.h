// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Makes this rank's step report, sends it, and evaluates the reports of all ranks.

#include <cstdint>
#include <string>
#include <vector>

#include "reducer/batch_weight.h"
#include "reducer/plan.h"
#include "reducer/replica_check.h"
#include "step/parameter_sample.h"
#include "step/report_exchange.h"

namespace apex::parallel::detail {

/// Thrown inside the reducer if an exception ended the backward of another rank, and
/// skip_failed_steps is set. Every rank except the failed ones throws it.
struct StepSkipped {};

/// The step reports of one reducer. Not thread safe.
class StepReporter {
 public:
  explicit StepReporter(ReducerContext& context)
      : replicas(context),
        exchange(context.members, context.parameters.size()),
        context_(context) {}

  /// The events of this rank, which the reducer reports to it.
  StepTracker tracker;
  BatchWeight weight;  ///< with the option weighted
  ReplicaCheck replicas;
  ReportExchange exchange;
  bool wants_skip = false;       ///< skip_step() was called for this backward, or the next one
  bool keeps_gradients = false;  ///< under join(): a gradient was added to the last average
  std::vector<bool> trainable;   ///< by parameter, in this backward

  void backward_began(const BackwardPass& pass);
  /// Clears the requests that were for this backward only.
  void backward_ended();
  /// @param failed  an exception has ended the backward.
  StepReport report(ReasonToLeave left, bool failed = false) const;
  /// Sends a row, unless the last bucket of `behind` carries it. `behind` is the plan by which
  /// buckets were sent; null if there is none. Does not wait.
  void send(const StepReport& report, const std::vector<uint8_t>& used, Plan* behind);

  /// Throws RankMismatch or StepSkipped on every rank if this backward is invalid.
  void refuse(const StepTable& table);
  /// Throws on every rank. Call it if settings, or dtypes or shapes of parameters, differ.
  /// Collective.
  [[noreturn]] void refuse_settings();

  /// Returns the error if ranks are out of step, else an empty text. Warns once if every rank steps
  /// its own gradients.
  std::string compare(const StepTable& table);
  /// The result of compare(), if the reports have arrived. Does not block.
  std::string out_of_step();

  StepTable::Names names() const {
    return [this](size_t i) { return context_.parameters[i].name; };
  }

 private:
  std::string describe(const StepTable& table) const;

  ReducerContext& context_;
  bool warned_ = false;  ///< that every rank steps its own gradients
};

}  // namespace apex::parallel::detail
