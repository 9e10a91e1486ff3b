// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The steps of a bucket in a backward: launch, wait, and hand out. All run on the thread that
/// holds the reducer's mutex.

#include <functional>
#include <vector>

#include "reducer/backward_pass.h"
#include "reducer/plan.h"

namespace apex::parallel::detail {

/// Waits on the current stream for the streams that produced the gradients, packs these, and starts
/// the reduction.
/// @param packed  called between packing and the start; may be empty.
void launch_bucket(PlannedBucket& entry, size_t index, const BackwardPass& pass,
                   ReducerContext& context, const std::function<void()>& packed);

/// Launches the buckets of `entries` that were not launched yet, with zeros. See Note [Carried
/// through].
/// @param failed        this backward is invalid.
/// @param write_report  writes the report to the tail of the last bucket, if it carries one.
void launch_absent(std::vector<PlannedBucket>& entries, bool failed, ReducerContext& context,
                   const std::function<void(const at::Tensor& tail)>& write_report);

/// Waits for a bucket if the next one must not be launched before it has completed.
void let_next_pass(PlannedBucket& entry, size_t index, ReducerContext& context);

/// Waits for a bucket. `meanwhile`: see wait_collective().
void await_bucket(PlannedBucket& entry, size_t index, const std::function<void()>& meanwhile,
                  ReducerContext& context);

/// Hands out the gradients of a completed bucket.
void hand_out_bucket(PlannedBucket& entry, const BackwardPass& pass, ReducerContext& context);

}  // namespace apex::parallel::detail
