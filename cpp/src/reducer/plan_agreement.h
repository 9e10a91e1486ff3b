// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// How ranks come to the same plan: each tells what it has recorded, all read the same table.

#include <cstdint>
#include <vector>

#include <apex/parallel/bucket_assignment.h>

#include "comm/membership.h"
#include "reducer/recording.h"

namespace apex::parallel::detail {

/// What all ranks have recorded. Collective; blocks the host. @throws CommunicationError.
/// @param used_by_any  by parameter: some rank has a gradient.
Recording exchange_recordings(const Membership& members, const Recording& mine,
                              const std::vector<uint8_t>& used_by_any);

/// Rank 0's plan, on every rank. `parameters` is the number of the model's parameters. Collective;
/// blocks the host.
BucketPlan broadcast_plan(const Membership& members, const BucketPlan& plan, int64_t parameters);

}  // namespace apex::parallel::detail
