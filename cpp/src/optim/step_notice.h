// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Tells reducers of the steps of optimizers in C++: libtorch has no hook on these.

#include <torch/optim/optimizer.h>

namespace apex::parallel::detail {

/// Who reports a step. A LossScaler and the optimizer that it steps both do, and one step must not
/// count as two.
enum class Reporter { kItself, kLossScaler };

/// `optimizer` has stepped: tells the reducers of its parameters. Does nothing while a StepInParts
/// lives in this thread. Does not block.
void report_step(torch::optim::Optimizer& optimizer, Reporter reporter);

/// While it lives, steps in this thread are parts of one that is reported for itself. How many
/// parts there are may differ by rank.
class StepInParts {
 public:
  StepInParts();
  ~StepInParts();
  StepInParts(const StepInParts&) = delete;
  StepInParts& operator=(const StepInParts&) = delete;
};

}  // namespace apex::parallel::detail
