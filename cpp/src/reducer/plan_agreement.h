// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// How ranks come to the same plan: each tells what it has recorded, all read the same table.

#include <cstdint>
#include <vector>

#include <apex/parallel/bucket_assignment.h>

#include "comm/membership.h"
#include "reducer/recording.h"

namespace apex::parallel::detail {

/// An exchange of recordings in flight.
class PlanExchange {
 public:
  /// Issues it. @throws CommunicationError.
  PlanExchange(const Membership& members, const Recording& mine);
  /// Blocks the host.
  AgreedRecording wait() const;

 private:
  ControlMessage maximum_;
  ControlMessage order_;
};

/// Rank 0's plans, on every rank: floating point may not be the same on all hosts. At most
/// kMostPlans; `parameters` is their number. Collective; blocks the host.
std::vector<BucketPlan> broadcast_plans(const Membership& members,
                                        const std::vector<BucketPlan>& plans, int64_t parameters);
constexpr int64_t kMostPlans = 8;

}  // namespace apex::parallel::detail
