// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Reports steps of C++ optimizers to the reducers, because libtorch's optimizers have no step
/// hooks.

#include <torch/optim/optimizer.h>

namespace apex::parallel::detail {

/// The object that reports a step. A LossScaler and the optimizer that it steps both report it, and
/// one step must not count as two.
enum class Reporter { kItself, kLossScaler };

/// Reports a step of `optimizer` to the reducers of its parameters. Does not block.
void report_step(torch::optim::Optimizer& optimizer, Reporter reporter);

}  // namespace apex::parallel::detail
