// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The start of a synchronized backward, before gradients are computed.

#include "reducer/backward.h"

namespace apex::parallel::detail {

/// @throws Error, CommunicationError if the reducer is released or has failed.
void refuse_failed(const ReducerContext& context);

/// Reads the state of the gradients and parameters. If the communication hook of this rank failed
/// in the last backward, also checks that it failed on all ranks; otherwise the reducer has failed.
BackwardPass open_pass(ReducerState& state);

}  // namespace apex::parallel::detail
