// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_reporter.h"

#include <utility>

#include <apex/error.h>

#include "comm/collectives.h"
#include "watch/stall.h"

namespace apex::parallel::detail {

void StepReporter::backward_began(const BackwardPass& pass) {
  ++context_.backward_number;
  exchange.drop();
  tracker.backward_began(pass.start.written, pass.start.written_locally);
}

void StepReporter::backward_ended() {
  wants_skip = keeps_gradients = false;
  weight.reset();
}

StepReport StepReporter::report(ReasonToLeave left, bool failed) const {
  StepReport report;
  report.left = left;
  report.failed = failed;
  report.without_data = context_.join.without_data;
  report.followed = context_.join.followed;
  report.ends_early = context_.join.throws;
  report.keeps_gradients = keeps_gradients;
  if (context_.options.weighted) report.weight = weight.value();
  // If the row is not read, it stays the same in most steps.
  if (!context_.reads_reports() && !context_.members.alone()) return report;
  report.facts = tracker.facts();
  report.skips = wants_skip;
  report.facts.compared = context_.options.check_steps.value_or(true) && !context_.join.active;
  // Otherwise the parameters of ranks may move by different distances.
  report.facts.measured =
      context_.options.ranks_begin_alike() && !context_.hook && !context_.options.steps_reported;
  return report;
}

void StepReporter::send(const StepReport& report, const std::vector<uint8_t>& used, Plan* behind) {
  // The name must be the same on every rank, except for the number. A rank that has left the plan
  // also uses it.
  const std::string backward = of_backward(context_);
  PlannedBucket* const last =
      behind == nullptr || behind->entries.empty() ? nullptr : &behind->entries.back();
  if (last == nullptr || !behind->carries_report) {
    const std::string bucket = last == nullptr ? "" : ", behind " + last->describe(context_);
    return exchange.send("exchange of reports" + backward + bucket, report, used, trainable);
  }
  exchange.sent_behind([last] { return last->reduction->done(); },
                       [last, this](const std::function<void()>& meanwhile) {
                         last->wait(meanwhile, context_);
                         return last->message.tail_of(last->message.tensor());
                       });
}

void StepReporter::refuse(const StepTable& table) {
  const std::string why = table.why_refused(names());
  if (why.empty()) return;
  for (Parameter& parameter : context_.parameters) parameter.touched = false;
  if (table.any_failed() && context_.options.skip_failed_steps) throw StepSkipped();
  throw RankMismatch(context_.me() + why + note_on_ranks(*context_.members.control()));
}

void StepReporter::refuse_settings() {
  verify_same_model(context_.parameters.named(), {}, context_.members.control());
  throw RankMismatch(context_.me() + "this rank has " + context_.describe_settings() +
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

std::string StepReporter::out_of_step() {
  const StepTable* table = exchange.peek();
  return table != nullptr && table->why_refused(names()).empty() ? describe(*table) : std::string();
}

}  // namespace apex::parallel::detail
