// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_agreement.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "fingerprint.h"

namespace apex::parallel::detail {

namespace {

/// Ranks may differ in who updates what for good reason; then they are not asked for ever.
constexpr int64_t kMostHarmlessDifferences = 3;

constexpr const char* kDetails = "exchange of what the ranks did in this step";

}  // namespace

bool must_refuse(const SeenFacts& seen) {
  return seen.failed() || (seen.plan_left() && seen.plan_kept());
}

StepFacts StepAgreement::facts(bool wants_rebuild, bool left_plan, bool skips) {
  sent_ = tracker.facts();
  sent_.wants_rebuild = wants_rebuild;
  sent_.left_plan = left_plan;
  sent_.skips = skips;
  sent_.compared = context_.options.check_steps.value_or(true) && !context_.joining;
  // Ranks that began with other parameters, or whose hook averages over some ranks only, may move
  // them differently.
  if (!context_.options.init_sync || context_.hook) sent_.moved = 0;
  return sent_;
}

at::Tensor StepAgreement::pack_details(bool failed) const {
  StepDetails details;
  details.facts = sent_;
  details.facts.failed = failed;
  details.backward = backwards_begun_;
  details.hook_failed = hook_failed_;
  details.reason = static_cast<int64_t>(reason_);
  return at::tensor(details.encode(), at::kLong);
}

ControlMessage StepAgreement::gather(const at::Tensor& mine) const {
  return context_.members.all_gather(kDetails, mine);
}

std::vector<StepDetails> StepAgreement::decode(const at::Tensor& all) const {
  std::vector<StepDetails> ranks;
  for (int rank = 0; rank < context_.members.size; ++rank) {
    ranks.push_back(
        StepDetails::decode(all.const_data_ptr<int64_t>() + rank * StepDetails::kFields));
  }
  return ranks;
}

void StepAgreement::refuse_failed_step(const SeenFacts& seen) {
  if (!must_refuse(seen)) return;
  const std::vector<StepDetails> ranks = decode(gather(pack_details(/*failed=*/false)).wait());
  hooks_apart_ = hooks_are_apart(ranks);
  for (Parameter& parameter : context_.parameters) parameter.touched = false;
  told_ = true;
  if (seen.failed() && context_.options.skip_failed_steps && !hooks_apart_) throw StepSkipped();
  throw RankMismatch(describe_difference(context_.members.rank, ranks) +
                     note_on_ranks(*context_.members.control()));
}

void StepAgreement::attend_refusal() {
  hooks_apart_ = hooks_are_apart(decode(gather(pack_details(/*failed=*/false)).wait()));
}

void StepAgreement::send_failure() {
  failure_ = gather(pack_details(/*failed=*/true));
  told_ = true;
}

void StepAgreement::look_back_on_failure() {
  const ControlMessage failure = std::exchange(failure_, {});
  if (std::exchange(hook_failed_, false) && failure)
    hooks_apart_ = hooks_are_apart(decode(failure.wait()));
}

void StepAgreement::refuse_settings(const std::string& mine) {
  told_ = true;
  context_.monitor.open(
      [&] { verify_same_model(context_.parameters.named(), {}, context_.members.control()); });
  throw RankMismatch(context_.me() + "this rank has " + mine +
                     ", another rank has not: register the same on every rank");
}

std::string StepAgreement::compare(const SeenFacts& seen, const std::vector<bool>& trainable) {
  if (!compared_ && !details_) {
    if (may_differ(seen)) {
      start_details();
    } else {
      compared_ = true;
    }
  }
  std::string error;
  while (!compared_) error = take_details(trainable);
  return error;
}

std::string StepAgreement::compare_early(const std::optional<SeenFacts>& seen,
                                         const std::vector<bool>& trainable) {
  if (details_.arrived()) return take_details(trainable);
  if (!details_ && seen && !must_refuse(*seen) && may_differ(*seen)) start_details();
  return {};
}

bool StepAgreement::may_differ(const SeenFacts& seen) const {
  return seen.differ() && harmless_differences_ < kMostHarmlessDifferences;
}

void StepAgreement::start_details(std::optional<int64_t> digest) {
  const at::Tensor mine = pack_details(/*failed=*/false);
  if (digest) mine.select(0, StepDetails::kFields - 1).fill_(*digest);
  details_ = gather(mine);
  have_digests_ = digest.has_value();
}

/// Waits for the exchange: decides, or asks for digests, too.
std::string StepAgreement::take_details(const std::vector<bool>& trainable) {
  const std::vector<StepDetails> ranks = decode(details_.wait());
  details_ = {};
  if (!have_digests_ && needs_digests(ranks)) {
    start_details(digest_of_parameters(trainable));
    return {};
  }
  compared_ = true;
  const std::string error = describe_difference(context_.members.rank, ranks);
  if (!error.empty()) return error + note_on_ranks(*context_.members.control());
  ++harmless_differences_;
  return {};
}

/// Of those that are trainable on some rank.
int64_t StepAgreement::digest_of_parameters(const std::vector<bool>& trainable) const {
  Fingerprint fingerprint;
  for (size_t i = 0; i < trainable.size(); ++i) {
    if (!trainable[i]) continue;
    const at::Tensor values = context_.parameters[i].variable.detach().cpu().contiguous();
    fingerprint.add(values.const_data_ptr(), values.nbytes());
  }
  return fingerprint.value();
}

}  // namespace apex::parallel::detail
