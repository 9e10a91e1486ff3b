// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What a reducer does before a synchronized backward has computed anything.

#include <cstdint>
#include <vector>

#include "reducer/backward.h"

namespace apex::parallel::detail {

/// @throws Error, CommunicationError of a reducer that is released or has failed.
void refuse_failed(const ReducerContext& context);

/// Looks at the gradients and parameters as they are, and, if the communication hook of this rank
/// failed in the last backward, whether it did so on all ranks: if not, the reducer has failed.
/// @param overtaken  by parameter; cleared.
BackwardPass open_pass(ReducerState& state, std::vector<uint8_t>& overtaken);

/// See Note [One plan per set]. Where several are kept it is collective, and blocks the host.
void choose_plan(ReducerState& state);

}  // namespace apex::parallel::detail
