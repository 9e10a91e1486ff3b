// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "step/parameter_sample.h"
#include "step/step_report.h"

namespace apex::parallel {

/// Tracks the events on this rank since its last synchronized backward: see Note [Ranks that are
/// out of step]. Does not communicate. Only optimizer_stepped() is thread safe.
class StepTracker {
 public:
  /// Compares these parameters from now on.
  void sample(const std::vector<at::Tensor>& parameters) { sample_.watch(parameters); }
  /// A gradient has arrived in a backward that is not synchronized.
  void gradient_arrived_locally() {
    if (!local_.exchange(true)) before_local_ = sample_.take();
  }
  /// An optimizer that holds parameters of this reducer has stepped.
  void optimizer_stepped() {
    ++steps_;
    if (local_) stepped_locally_ = true;
  }

  /// A synchronized backward begins. By their versions, parameters were `written` since the last
  /// one began, or `written_locally`, after a gradient that was not synchronized.
  void backward_began(bool written, bool written_locally) {
    const double last = sample_.take();
    facts_.local = (local_.exchange(false) && last != 0) || written_locally;
    facts_.moved = std::exchange(before_local_, 0) + last;
    facts_.written = written;
    facts_.steps = steps_.exchange(0);
    facts_.stepped_locally = stepped_locally_.exchange(false);
    facts_.sample = sample_.fingerprint();
  }
  /// The facts of the backward that has begun.
  const StepFacts& facts() const { return facts_; }
  /// Parameters were made equal on all ranks: ignores what has happened before.
  void forget() { backward_began(false, false); }

 private:
  std::atomic<int64_t> steps_{0};             ///< since the last synchronized backward began
  std::atomic<bool> local_{false};            ///< a gradient arrived without synchronization since
  std::atomic<bool> stepped_locally_{false};  ///< an optimizer has stepped after that
  ParameterSample sample_;
  double before_local_ = 0;  ///< how far sample_ had moved before the first local gradient
  StepFacts facts_;
};

}  // namespace apex::parallel
