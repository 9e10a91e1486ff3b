// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What happens to a bucket in a backward, step by step; each on the thread that changes the
/// reducer.

#include <functional>
#include <string>
#include <vector>

#include "reducer/backward_pass.h"
#include "reducer/plan.h"

namespace apex::parallel::detail {

/// Waits on the current stream for the streams that produced the gradients, packs these, and starts
/// the reduction.
/// @param incoming  see BucketMessage::pack().
/// @param packed    called in between, for the bucket that carries the report.
void launch_bucket(PlannedBucket& entry, size_t index, const BackwardPass& pass,
                   const at::Tensor& incoming, ReducerContext& context,
                   const std::function<void()>& packed = {});

/// Launches what `entries` still have to send as this rank's part of a backward: zeros. See
/// Note [Carried through].
/// @param end                those before this one.
/// @param failed             nothing of this backward counts.
/// @param without_user_code  those whose reduction runs user code send nothing: it failed.
/// @param write_report       into the tail of the last one, if it carries the report.
void launch_absent(std::vector<PlannedBucket>& entries, size_t end, bool failed,
                   bool without_user_code, ReducerContext& context,
                   const std::function<void(const at::Tensor& tail)>& write_report);

/// Waits for a bucket that the next one must not overtake.
void let_next_pass(PlannedBucket& entry, size_t index, ReducerContext& context);

/// Later phases of reductions that have them, in the order of the buckets.
void run_next_phases(Plan& plan, ReducerContext& context);

/// Waits for a bucket. `meanwhile`: see wait_collective().
void await_bucket(PlannedBucket& entry, size_t index, const std::function<void()>& meanwhile,
                  ReducerContext& context);

/// Hands out the gradients of a bucket that has arrived.
void hand_out_bucket(PlannedBucket& entry, const BackwardPass& pass, ReducerContext& context);

/// Reduces gradients that are in no bucket of this backward. The same list on every rank.
/// @param call_back  is given each list of parameters that are complete.
void reduce_late(const std::vector<int64_t>& parameters, const std::vector<Place>& places,
                 const BackwardPass& pass,
                 const std::function<void(const std::vector<BucketMessage::Slot>&)>& call_back,
                 ReducerContext& context);

/// Makes reduced gradients views of the messages of a plan that was made since.
void move_gradients_in(Plan& plan, ReducerContext& context);

}  // namespace apex::parallel::detail
