// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What ranks tell each other about the step that they are in, and what follows from it.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reducer/context.h"
#include "reducer/step_facts.h"
#include "reducer/step_tracker.h"

namespace apex::parallel::detail {

/// A rank failed, or has left the plan while others have kept it: no gradient of this backward
/// counts.
bool must_refuse(const SeenFacts& seen);

/// Thrown inside the reducer, on every rank but the failed ones: an exception ended the backward of
/// a rank, and the options say that the step is skipped then.
struct StepSkipped {};

/// Not thread safe.
class StepAgreement {
 public:
  explicit StepAgreement(ReducerContext& context) : context_(context) {}

  /// What this rank has done; the reducer tells it.
  StepTracker tracker;

  void backward_began() {
    ++backwards_begun_;
    compared_ = told_ = false;
    details_ = {};
  }

  /// What this rank says in this backward from now on.
  StepFacts facts(bool wants_rebuild, bool left_plan, bool skips);
  /// The same of a rank whose backward an exception has ended.
  static StepFacts failure() {
    StepFacts facts;
    facts.failed = true;
    return facts;
  }

  /// Why this rank has left the plan, for the others.
  void set_reason(ReasonToLeave reason) { reason_ = reason; }
  /// The communication hook of this rank threw; `everywhere`: that of every rank.
  void set_hook_failed(bool everywhere) {
    hook_failed_ = true;
    told_ = told_ || everywhere;
  }
  bool hook_failed() const { return hook_failed_; }

  /// All ranks have heard how this backward ends; nothing more may be sent for it.
  bool told() const { return told_; }

  /// Collective where `seen` says so: throws RankMismatch or StepSkipped on every rank. Blocks the
  /// host.
  void refuse_failed_step(const SeenFacts& seen);
  /// For a rank that cannot take part in that: sends its details, and does not wait.
  void send_failure();
  /// Before the next backward: what the others did in the one in which this rank failed. Blocks the
  /// host.
  void look_back_on_failure();
  /// For a rank that fails when all its messages are on their way: takes part without throwing.
  void attend_refusal();
  /// The ranks' messages do not match any more: hooks have failed on some ranks only.
  bool hooks_apart() const { return hooks_apart_; }

  /// Collective where `seen` says so. Returns the error if ranks are out of step, else an empty
  /// text. Blocks the host.
  /// @param trainable  by parameter: on some rank.
  std::string compare(const SeenFacts& seen, const std::vector<bool>& trainable);
  /// Begins that, or goes on with it, if it does not have to wait: `seen` is read if there is
  /// nothing to go on with.
  std::string compare_early(const std::optional<SeenFacts>& seen,
                            const std::vector<bool>& trainable);
  bool compared() const { return compared_; }
  bool comparing() const { return static_cast<bool>(details_); }

  /// Settings, or dtypes or shapes of parameters, differ, says an agreement; throws on every rank.
  [[noreturn]] void refuse_settings(const std::string& mine);

  void drop() { failure_ = details_ = {}; }

 private:
  bool may_differ(const SeenFacts& seen) const;
  at::Tensor pack_details(bool failed) const;
  ControlMessage gather(const at::Tensor& mine) const;
  std::vector<StepDetails> decode(const at::Tensor& all) const;
  void start_details(std::optional<int64_t> digest = std::nullopt);
  std::string take_details(const std::vector<bool>& trainable);
  int64_t digest_of_parameters(const std::vector<bool>& trainable) const;

  ReducerContext& context_;
  StepFacts sent_;  ///< in this backward
  int64_t backwards_begun_ = 0;
  ReasonToLeave reason_ = ReasonToLeave::kNone;
  bool hook_failed_ = false;
  bool hooks_apart_ = false;
  bool told_ = false;
  bool compared_ = false;   ///< in this backward
  ControlMessage details_;  ///< the exchange that compares, where it has begun
  bool have_digests_ = false;
  ControlMessage failure_;  ///< details, after this rank has failed
  int64_t harmless_differences_ =
      0;  ///< so many times ranks differed in updates, but not in parameters
};

}  // namespace apex::parallel::detail
