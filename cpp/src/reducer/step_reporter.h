// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What this rank says in the reports of a reducer, and what follows from those of all ranks.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reducer/batch_weight.h"
#include "reducer/context.h"
#include "reducer/gradient_meter.h"
#include "reducer/plan.h"
#include "reducer/replica_check.h"
#include "reducer/step_timer.h"
#include "step/report_exchange.h"
#include "step/step_tracker.h"

namespace apex::parallel::detail {

/// Thrown inside the reducer, on every rank but the failed ones: an exception ended the backward of
/// a rank, and the options say that the step is skipped then.
struct StepSkipped {};

/// Not thread safe.
class StepReporter {
 public:
  explicit StepReporter(ReducerContext& context)
      : timer(context),
        replicas(context),
        gradients(context),
        context_(context),
        exchange_(context.members, context.parameters.size()) {}

  /// What this rank has done; the reducer tells it.
  StepTracker tracker;
  /// Of this rank, where ranks read each other's reports; and what all have told.
  StepTimer timer;
  BatchWeight weight;  ///< with the option weighted
  ReplicaCheck replicas;
  GradientMeter gradients;
  bool wants_skip = false;      ///< skip_step() was called for this backward, or the next one
  bool without_data = false;    ///< under join(): this rank follows the others
  bool hook_failed = false;     ///< the communication hook of this rank threw in this backward
  std::vector<bool> trainable;  ///< by parameter, when this backward began

  void backward_began();
  /// What was meant for this backward is not for a later one.
  void backward_ended();
  /// What there is to say if nothing went wrong.
  StepReport report(ReasonToLeave left) const;
  /// The same of a rank whose backward an exception has ended.
  StepReport failure();
  /// The row in the tail of a bucket, see ReportExchange.
  void write(const StepReport& report, const std::vector<uint8_t>& used, const at::Tensor& tail);
  /// Sends a row, unless it travels with `behind`, by which buckets were sent; null: there are
  /// none. Does not wait.
  void send(const StepReport& report, const std::vector<uint8_t>& used, Plan* behind);

  /// The rows of all ranks, for the last that was sent. Blocks the host, with the monitor open.
  const StepTable& receive(const std::function<void()>& meanwhile = {});
  /// Where nobody reads them: see ReportExchange.
  void order() const { exchange_.order(); }
  /// Before the next backward: what the others did in one in which this rank failed; null if it did
  /// not. Blocks the host.
  const StepTable* look_back();
  void drop() { exchange_.drop(); }

  /// Throws RankMismatch or StepSkipped, on every rank, if nothing of this backward counts.
  void refuse(const StepTable& table);
  /// Settings, or dtypes or shapes of parameters, differ; throws on every rank. Collective.
  [[noreturn]] void refuse_settings(const std::string& mine);

  /// Returns the error if ranks are out of step, else an empty text. If the rows do not decide
  /// that, it is collective. Blocks the host.
  std::string compare(const StepTable& table);
  /// What compare() will return, where that is known. Does not block.
  std::string out_of_step() const;

  StepTable::Names names() const {
    return [this](size_t i) { return context_.parameters[i].name; };
  }

 private:
  std::string describe(const StepTable& table) const;
  bool parameters_differ(const std::vector<bool>& trainable) const;

  ReducerContext& context_;
  mutable ReportExchange exchange_;
  bool failed_ = false;      ///< in the last backward
  int64_t differences_ = 0;  ///< that the rows did not decide
};

}  // namespace apex::parallel::detail
