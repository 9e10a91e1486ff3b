// SPDX-License-Identifier: BSD-3-Clause
#include "optim/step_notice.h"

#include <cstdint>
#include <vector>

#include <apex/parallel/reducer.h>

namespace apex::parallel::detail {

namespace {

thread_local int parts_in_progress = 0;

}  // namespace

void report_step(torch::optim::Optimizer& optimizer, Reporter reporter) {
  if (parts_in_progress > 0) return;
  // One of each group is enough: its owner is told of the step.
  std::vector<at::Tensor> some;
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) some.push_back(group.params().front());
  }
  // Another number for each reporter: addresses of optimizers are even.
  const auto number =
      static_cast<int64_t>(reinterpret_cast<intptr_t>(&optimizer)) + static_cast<int>(reporter);
  // Not all: the same program may step others, or this one, without a LossScaler.
  Reducer::optimizer_stepped(some, number, /*all=*/false);
}

StepInParts::StepInParts() { ++parts_in_progress; }
StepInParts::~StepInParts() { --parts_in_progress; }

}  // namespace apex::parallel::detail
