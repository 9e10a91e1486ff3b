// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The autograd hooks of a reducer, without Python.

#include <cstddef>
#include <memory>

#include <torch/csrc/autograd/function_hook.h>

#include "reducer/watched_outputs.h"

namespace apex::parallel::detail {

class ReducerCore;

/// The hook calls gradient_ready() after a parameter's gradient was accumulated.
std::unique_ptr<torch::autograd::FunctionPostHook> make_gradient_hook(
    std::weak_ptr<ReducerCore> core, size_t index);

/// The hook calls BackwardSession::reach() when backward reaches an output of the model. It keeps
/// the reducer alive as long as there may be gradients to synchronize.
std::unique_ptr<torch::autograd::FunctionPreHook> make_output_hook(
    std::shared_ptr<ReducerCore> core, std::shared_ptr<const WatchedOutput> output);

}  // namespace apex::parallel::detail
