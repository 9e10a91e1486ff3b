// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>

#include "comm/collectives.h"
#include "reducer/context.h"
#include "reducer/observer.h"
#include "step/step_times.h"

namespace apex::parallel::detail {

/// Measures the times in the step report, if ranks read each other's reports. It reads the clock
/// for each gradient and a few times per backward. Not thread safe; the reducer serializes calls.
class StepTimer final : public BackwardObserver {
 public:
  explicit StepTimer(ReducerContext& context) : context_(context) { context.observers.add(this); }
  ~StepTimer() override { context_.observers.remove(this); }
  StepTimer(const StepTimer&) = delete;
  StepTimer& operator=(const StepTimer&) = delete;

  void began(std::optional<c10::Device> /*device*/, size_t /*parameters*/) override {
    on_ = context_.reads_reports();
    deferred_ = false;
    if (on_) clock_.backward_began(now(), time_waited());
  }
  void gradient_ready(size_t parameter) override {
    if (on_) clock_.gradient_ready(parameter, now(), time_waited());
  }
  void deferred() override {
    if (on_) clock_.ended(now(), time_waited());
    deferred_ = true;
  }
  /// A deferred backward has already ended, in deferred().
  void completed() override {
    if (on_ && !deferred_) clock_.ended(now(), time_waited());
  }
  void dropped() override { clock_.dropped(); }

  StepTimes times() const { return on_ ? clock_.times(now(), time_waited()) : StepTimes(); }

  StepHistory history;  ///< of all ranks; the reducer adds to it

 private:
  static StepClock::Time now() { return std::chrono::steady_clock::now(); }

  ReducerContext& context_;
  StepClock clock_;
  bool on_ = false;
  bool deferred_ = false;  ///< the last backward was deferred
};

}  // namespace apex::parallel::detail
