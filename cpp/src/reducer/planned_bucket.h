// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A bucket of a plan, and its steps in a backward: launch, wait, and hand out. All run on the
/// thread that holds the reducer's mutex.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "reducer/backward_pass.h"
#include "reducer/context.h"

namespace apex::parallel::detail {

struct PlannedBucket {
  PlannedBucket(BucketMessage of, std::unique_ptr<Reduction> by, size_t place)
      : message(std::move(of)),
        reduction(std::move(by)),
        traits(reduction->traits()),
        index(place) {
    reset();
  }

  BucketMessage message;
  std::unique_ptr<Reduction> reduction;
  ReductionTraits traits;
  size_t index;         ///< in the order of launches
  int64_t pending = 0;  ///< parameters that must fire before it is launched
  bool launched = false;
  std::vector<c10::Stream> producers;      ///< streams that produced its gradients
  std::optional<c10::Stream> unpacked_on;  ///< in the last complete backward

  /// Prepares the bucket for the next backward.
  void reset();

  /// Waits on the current stream for the streams that produced the gradients, packs these, and
  /// starts the reduction.
  /// @param packed  called between packing and the start; may be empty.
  void launch(const BackwardPass& pass, ReducerContext& context,
              const std::function<void()>& packed);
  /// Launches zeros. See Note [Carried through].
  /// @param poison        launches NaN instead.
  /// @param write_report  writes the report to the tail of the message, if that carries one.
  void launch_absent(bool poison, const ReducerContext& context,
                     const std::function<void(const at::Tensor& tail)>& write_report);
  /// Waits if the next bucket must not be launched before this one has completed.
  void let_next_pass(const ReducerContext& context);
  /// `meanwhile`: see wait_collective().
  void wait(const std::function<void()>& meanwhile, const ReducerContext& context);
  /// Hands out the gradients when the bucket is complete.
  void hand_out(const BackwardPass& pass, const ReducerContext& context);

  /// "all-reduce of bucket 1 (parameter 'a' to 'b', 2 parameters, 30 elements)".
  std::string describe(const ReducerContext& context) const;

 private:
  void join_producers() const;
  void keep_gradients() const;
  std::string name(const ReducerContext& context) const;
};

/// @param members  indices of its parameters.
/// @param hook     the communication hook; null for none.
/// @param is_last  the last bucket of the plan, which may carry the report.
PlannedBucket make_bucket(const std::vector<int64_t>& members, size_t index,
                          const std::shared_ptr<CommHook>& hook, bool is_last,
                          ReducerContext& context);

/// The end of the name of every collective of a backward: ", of backward number 7".
std::string of_backward(const ReducerContext& context);

}  // namespace apex::parallel::detail
