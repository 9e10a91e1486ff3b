// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What is known of one backward while it lasts.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace apex::parallel::detail {

/// By parameter, of one backward.
struct GradientState {
  int32_t fired = 0;       ///< times its gradient was accumulated
  int64_t last_fired = 0;  ///< when, in the order of all
  bool stale =
      false;  ///< .grad is still what the last synchronized backward left, and this one adds to it
};

/// A value: made when a backward begins, gone when its gradients are complete.
struct BackwardPass {
  explicit BackwardPass(size_t parameters)
      : gradients(parameters),
        used(parameters, 0),
        kept(parameters, 0),
        overtaken(parameters, 0),
        used_by_any(parameters, 0) {}

  std::vector<GradientState> gradients;
  std::vector<uint8_t> used;         ///< by parameter: this rank contributes
  std::vector<uint8_t> kept;         ///< by parameter: .grad was there when this backward began
  std::vector<uint8_t> overtaken;    ///< by parameter: forward used it before its update
  std::vector<uint8_t> used_by_any;  ///< by parameter, at the end, where it was asked for
  int64_t clock = 0;                 ///< gradients so far
  bool recorded = false;             ///< it had no plan when it began
  bool skipped = false;              ///< a rank has skipped this step: see Note [Skipped steps]
  bool refused = false;              ///< every rank throws, or skips: nothing more is sent for it
  bool reported = false;             ///< the report was sent that follows all buckets
  size_t next_launch = 0;            ///< the bucket that is launched next
  size_t done = 0;                   ///< buckets that had arrived when gradients were computed

  // Errors that are thrown when the other ranks have been served.
  std::string error;        ///< the first of this rank
  std::string out_of_step;  ///< the ranks are; outranks the others
  std::string non_finite;
  std::exception_ptr callback_error;  ///< what the bucket callback threw
  std::exception_ptr
      failure;  ///< gradients could not be handed out: nothing of this backward counts

  void fail(std::string text) {
    if (error.empty()) error = std::move(text);
  }
  /// Throws what is to be thrown, RankMismatch, Error, NonFiniteGradient or the callback's, or
  /// returns.
  void rethrow() const;
};

}  // namespace apex::parallel::detail
