// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_reporter.h"

#include <utility>

#include <apex/error.h>

#include "comm/collectives.h"
#include "watch/notice.h"

namespace apex::parallel::detail {

void StepReporter::backward_began() {
  ++context_.backward_number;
  exchange_.drop();
  finite.backward_began();
}

void StepReporter::backward_ended() {
  wants_skip = keeps_gradients = false;
  weight.reset();
}

StepReport StepReporter::report(ReasonToLeave left) const {
  StepReport report;
  report.left = left;
  report.without_data = context_.join.without_data;
  report.followed = context_.join.followed;
  report.ends_early = context_.join.throws;
  report.keeps_gradients = keeps_gradients;
  if (context_.options.weighted) report.weight = weight.value();
  // If the row is not read, it stays the same in most steps.
  if (!context_.reads_reports() && !context_.members.alone()) return report;
  report.backward = context_.backward_number;
  report.facts = tracker.facts();
  report.skips = wants_skip;
  report.compared = context_.options.check_steps.value_or(true) && !context_.join.active;
  // If ranks began with different parameters, or a hook averages over some ranks only, parameters
  // may move by different distances.
  report.measured =
      context_.options.ranks_begin_alike() && !context_.hook && !context_.options.steps_reported;
  return report;
}

StepReport StepReporter::failure() const {
  StepReport failure = report(ReasonToLeave::kNone);
  failure.failed = true;
  return failure;
}

void StepReporter::write(const StepReport& report, const std::vector<uint8_t>& used,
                         const at::Tensor& tail) {
  exchange_.write(report, used, trainable, tail);
}

void StepReporter::send(const StepReport& report, const std::vector<uint8_t>& used, Plan* behind) {
  // The name must be the same on every rank, except for the number. A rank that has left the plan
  // also uses it.
  const std::string what =
      "exchange of reports, of backward number " + std::to_string(context_.backward_number);
  if (behind == nullptr || behind->entries.empty())
    return exchange_.send(what, report, used, trainable);
  PlannedBucket& last = behind->entries.back();
  const std::string name = describe_bucket(last, behind->entries.size() - 1, context_);
  if (!behind->carries_report) {
    const std::string bucket = name.substr(0, name.rfind(", of backward number"));
    return exchange_.send(what + ", behind " + bucket, report, used, trainable);
  }
  exchange_.sent_behind([&last] { return last.reduction->done(); },
                        [&last, name](const std::function<void()>& meanwhile) {
                          last.reduction->wait(name, meanwhile);
                          return last.message.tail_of(last.message.tensor());
                        },
                        last.traits.averages ? context_.members.size : 1);
}

const StepTable& StepReporter::receive(const std::function<void()>& meanwhile) {
  return exchange_.receive(meanwhile);
}

void StepReporter::refuse(const StepTable& table) {
  const std::string why = table.why_refused(names());
  if (why.empty()) return;
  for (Parameter& parameter : context_.parameters) parameter.touched = false;
  if (table.any_failed() && context_.options.skip_failed_steps) throw StepSkipped();
  throw RankMismatch(context_.me() + why + note_on_ranks(*context_.members.control()));
}

void StepReporter::refuse_settings(const std::string& mine) {
  verify_same_model(context_.parameters.named(), {}, context_.members.control());
  throw RankMismatch(context_.me() + "this rank has " + mine +
                     ", but another rank does not: register the same on every rank");
}

std::string StepReporter::describe(const StepTable& table) const {
  const std::string difference = table.describe_difference();
  if (difference.empty()) return {};
  return context_.me() + difference + note_on_ranks(*context_.members.control());
}

std::string StepReporter::compare(const StepTable& table) {
  if (table.all_stepped_locally() && context_.members.rank == 0 && !std::exchange(warned_, true)) {
    notify(
        "every rank has stepped an optimizer with its own gradients, after a backward under "
        "no_sync(), so the parameters of the ranks drift apart: run the last backward before each "
        "step outside of no_sync()");
  }
  return describe(table);
}

std::string StepReporter::out_of_step() const {
  const StepTable* table = exchange_.peek();
  return table != nullptr && table->why_refused(names()).empty() ? describe(*table) : std::string();
}

}  // namespace apex::parallel::detail
