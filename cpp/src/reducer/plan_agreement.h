// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives by which the ranks agree on a plan: each rank sends its recording, and all receive
/// the same combined recording.

#include <cstdint>
#include <vector>

#include <apex/parallel/bucket_assignment.h>

#include "comm/membership.h"
#include "reducer/recording.h"

namespace apex::parallel::detail {

/// Combines the recordings of all ranks. Collective; blocks the host. @throws CommunicationError.
/// @param used_by_any  by parameter: whether a rank has a gradient.
Recording exchange_recordings(const Membership& members, const Recording& mine,
                              const std::vector<uint8_t>& used_by_any);

/// Returns rank 0's plan on every rank. `parameters` is the number of the model's parameters.
/// Collective; blocks the host.
BucketPlan broadcast_plan(const Membership& members, const BucketPlan& plan, int64_t parameters);

}  // namespace apex::parallel::detail
