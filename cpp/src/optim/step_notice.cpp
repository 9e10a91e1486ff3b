// SPDX-License-Identifier: BSD-3-Clause
#include "optim/step_notice.h"

#include <cstdint>
#include <vector>

#include <apex/parallel/reducer.h>

namespace apex::parallel::detail {

void report_step(torch::optim::Optimizer& optimizer, Reporter reporter) {
  // One parameter of each group is enough to find the reducer.
  std::vector<at::Tensor> some;
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) some.push_back(group.params().front());
  }
  // A different number for each reporter. Addresses of optimizers are even.
  const auto number =
      static_cast<int64_t>(reinterpret_cast<intptr_t>(&optimizer)) + static_cast<int>(reporter);
  Reducer::optimizer_stepped(some, number);
}

}  // namespace apex::parallel::detail
