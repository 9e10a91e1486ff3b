// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Makes this rank's step report, exchanges it, and evaluates the reports of all ranks.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reducer/batch_weight.h"
#include "reducer/context.h"
#include "reducer/finite_check.h"
#include "reducer/plan.h"
#include "reducer/replica_check.h"
#include "step/report_exchange.h"
#include "step/step_tracker.h"

namespace apex::parallel::detail {

/// Thrown inside the reducer if an exception ended the backward of another rank, and
/// skip_failed_steps is set. Every rank except the failed ones throws it.
struct StepSkipped {};

/// The step reports of one reducer. Not thread safe.
class StepReporter {
 public:
  explicit StepReporter(ReducerContext& context)
      : replicas(context),
        context_(context),
        exchange_(context.members, context.parameters.size()) {}

  /// The events of this rank, which the reducer reports to it.
  StepTracker tracker;
  BatchWeight weight;  ///< with the option weighted
  ReplicaCheck replicas;
  FiniteCheck finite;            ///< with the option check_finite
  bool wants_skip = false;       ///< skip_step() was called for this backward, or the next one
  bool keeps_gradients = false;  ///< under join(): a gradient was added to the last average
  std::vector<bool> trainable;   ///< by parameter, when this backward began

  void backward_began();
  /// Clears the requests that were for this backward only.
  void backward_ended();
  /// The report of a backward without an exception.
  StepReport report(ReasonToLeave left) const;
  /// The report of a backward that an exception has ended.
  StepReport failure() const;
  /// Writes the row into the tail of a bucket, see ReportExchange.
  void write(const StepReport& report, const std::vector<uint8_t>& used, const at::Tensor& tail);
  /// Sends a row, unless the last bucket of `behind` carries it. `behind` is the plan by which
  /// buckets were sent; null if there is none. Does not wait.
  void send(const StepReport& report, const std::vector<uint8_t>& used, Plan* behind);

  /// The rows of all ranks of the last exchange. Blocks the host.
  const StepTable& receive(const std::function<void()>& meanwhile = {});
  /// For reports that are not read: see ReportExchange.
  void order() { exchange_.order(); }
  void drop() { exchange_.drop(); }

  /// Throws RankMismatch or StepSkipped on every rank if this backward is invalid.
  void refuse(const StepTable& table);
  /// Throws on every rank. Call it if settings, or dtypes or shapes of parameters, differ.
  /// Collective.
  [[noreturn]] void refuse_settings(const std::string& mine);

  /// Returns the error if ranks are out of step, else an empty text. Warns once if every rank steps
  /// its own gradients.
  std::string compare(const StepTable& table);
  /// The result of compare(), if the reports have arrived. Does not block.
  std::string out_of_step() const;

  StepTable::Names names() const {
    return [this](size_t i) { return context_.parameters[i].name; };
  }

 private:
  std::string describe(const StepTable& table) const;

  ReducerContext& context_;
  mutable ReportExchange exchange_;
  bool warned_ = false;  ///< that every rank steps its own gradients
};

}  // namespace apex::parallel::detail
