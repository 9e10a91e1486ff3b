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
        used_by_any(parameters, 0) {}

  std::vector<GradientState> gradients;
  std::vector<uint8_t> used;         ///< by parameter: this rank contributes
  std::vector<uint8_t> kept;         ///< by parameter: .grad was there when this backward began
  std::vector<uint8_t> used_by_any;  ///< by parameter, at the end, where it was asked for
  int64_t clock = 0;                 ///< gradients so far
  bool wants_rebuild =
      false;  ///< parameters were frozen or unfrozen on this rank since the plan was agreed on
  /// Under join(): its end is to be announced, and its buckets follow the last announcement, so
  /// that all come in the same order on ranks without data.
  bool owes_end = false;
  bool reported = false;   ///< the facts of this rank were sent
  bool skipped = false;    ///< a rank has skipped this step: see Note [Skipped steps]
  size_t next_launch = 0;  ///< the bucket that is launched next
  bool launching = false;  ///< a thread is launching, and sees to what becomes ready meanwhile

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
