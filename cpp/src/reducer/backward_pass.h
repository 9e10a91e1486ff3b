// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The state of one backward.

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "reducer/context.h"

namespace apex::parallel::detail {

/// The state of one parameter's gradient in one backward.
struct GradientState {
  int32_t fired = 0;       ///< times its gradient was accumulated
  int64_t last_fired = 0;  ///< BackwardPass::fired at the last time
  /// .grad is the result of the last synchronized backward, and this one adds to it.
  bool stale = false;
};

/// Looks for gradients that are infinite or NaN: see ReducerOptions::check_finite.
class FiniteCheck {
 public:
  /// Looks at a packed message. Call it before its reduction starts, which may overwrite it. On the
  /// CPU it adds up the bucket, and looks at single gradients only if the sum is not finite. On a
  /// device it does not block the host.
  void look(const BucketMessage& message);
  /// Looks at the gradient of a parameter that is in no message.
  void look(int64_t parameter, const at::Tensor& gradient);
  /// The index of the first parameter with such a gradient, or -1. Waits for a device.
  int64_t first() const;

 private:
  /// Parameters, and the largest magnitudes of their gradients.
  std::vector<std::pair<std::vector<int64_t>, at::Tensor>> largest_;
};

/// What a backward finds when it begins.
struct BackwardStart {
  std::vector<uint8_t> kept;     ///< by parameter: .grad was defined
  bool written = false;          ///< parameters were, since the last backward began
  bool written_locally = false;  ///< and after a gradient that was not synchronized
  bool accumulated = false;      ///< gradients had accumulated without synchronization
};

/// What is thrown after all messages to other ranks were sent.
struct BackwardErrors {
  std::string first;        ///< of this rank
  std::string out_of_step;  ///< the ranks are out of step; has priority over the others
  std::string non_finite;
  std::exception_ptr failure;  ///< thrown while gradients were handed out; the backward is invalid
};

/// The state of one backward. A value type, which lives until the gradients are complete.
struct BackwardPass {
  explicit BackwardPass(size_t parameters)
      : gradients(parameters),
        used(parameters, 0),
        used_by_any(parameters, 0),
        start{std::vector<uint8_t>(parameters, 0)} {}

  std::vector<GradientState> gradients;
  std::vector<uint8_t> used;         ///< by parameter: this rank has a gradient
  std::vector<uint8_t> used_by_any;  ///< by parameter: a rank has a gradient; set at the end
  BackwardStart start;
  int64_t fired = 0;       ///< gradients so far
  bool recorded = false;   ///< it had no plan when it began
  bool skipped = false;    ///< a rank has skipped this step: see Note [Skipped steps]
  bool refused = false;    ///< every rank throws or skips, and sends nothing more
  bool reported = false;   ///< the report, which follows all buckets, was sent
  FiniteCheck finite;      ///< with the option check_finite
  size_t next_launch = 0;  ///< the next bucket to launch
  BackwardErrors errors;

  void fail(std::string text) {
    if (errors.first.empty()) errors.first = std::move(text);
  }
};

/// @throws Error, CommunicationError if the reducer is released or has failed.
void refuse_failed(const ReducerContext& context);

/// The start of a synchronized backward: reads the state of the gradients and parameters.
BackwardPass open_pass(ReducerContext& context);

}  // namespace apex::parallel::detail
