// SPDX-License-Identifier: BSD-3-Clause
#include "step/step_times.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <utility>

namespace apex::parallel {

namespace {

constexpr double kMilli = 1e3;

std::string format(const char* how, ...) {
  char text[200];
  va_list arguments;
  va_start(arguments, how);
  std::vsnprintf(text, sizeof(text), how, arguments);
  va_end(arguments);
  return text;
}

std::string describe_gap(const RankTimes& rank) {
  const std::string to =
      rank.gap_to_name.empty() ? std::string("the last one") : "'" + rank.gap_to_name + "'";
  return rank.gap_from < 0 ? "before the first gradient, of " + to
                           : "between the gradients of '" + rank.gap_from_name + "' and " + to;
}

/// The median over all ranks except `but`.
double median_of(const std::vector<RankTimes>& ranks, size_t but, double RankTimes::* what) {
  std::vector<double> values;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (r != but) values.push_back(ranks[r].*what);
  }
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string describe_straggler(const StragglerReport& report) {
  const auto rank = static_cast<size_t>(report.straggler);
  const RankTimes& one = report.ranks[rank];
  const double before =
      one.before_backward_s - median_of(report.ranks, rank, &RankTimes::before_backward_s);
  const double within = one.backward_s - median_of(report.ranks, rank, &RankTimes::backward_s);
  std::string text = format(
      "rank %zu holds up the others: its own time is %.2f times theirs, and it is the last in %.0f "
      "%% of the steps; ",
      rank, one.ratio, one.last_share * 100);
  if (before >= within)
    return text +
           format("%.1f ms more before backward (optimizer, data, forward)", before * kMilli);
  text += format("%.1f ms more in backward", within * kMilli);
  // Name the gap if it explains most of the difference; otherwise all of backward is slower.
  if (one.gap_s < within / 2) return text + ", spread over its gradients";
  return text + format(", %.1f ms of it ", one.gap_s * kMilli) + describe_gap(one);
}

}  // namespace

std::string to_string(const StragglerReport& report) {
  std::string text =
      format("%lld steps; own time of each rank, in ms\n", static_cast<long long>(report.steps));
  text += format("%6s %9s %9s %9s %9s %9s %8s\n", "rank", "median", "p95", "before", "backward",
                 "ratio", "last");
  for (size_t r = 0; r < report.ranks.size(); ++r) {
    const RankTimes& one = report.ranks[r];
    text += format("%6zu %9.2f %9.2f %9.2f %9.2f %9.2f %6.0f %%\n", r, one.own_s * kMilli,
                   one.own_p95_s * kMilli, one.before_backward_s * kMilli, one.backward_s * kMilli,
                   one.ratio, one.last_share * 100);
  }
  return text +
         (report.straggler < 0 ? "no rank holds up the others" : describe_straggler(report)) + '\n';
}

namespace detail {

namespace {

constexpr double kMicro = 1e-6;
constexpr int64_t kLeastSteps = 10;
constexpr double kSlower = 1.02;
constexpr double kDeviations = 3;

double at_share(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - static_cast<double>(below));
}

/// Finds the pair of gradients between which the longest gaps take the most time over all steps,
/// and the median length of these gaps.
void find_gap(RankTimes& times, const std::vector<StepTimes>& steps) {
  std::map<std::pair<int32_t, int32_t>, std::vector<double>> gaps;
  for (const StepTimes& step : steps)
    gaps[{step.gap_from, step.gap_to}].push_back(static_cast<double>(step.gap) * kMicro);
  double most = -1;
  for (const auto& [place, seconds] : gaps) {
    double sum = 0;
    for (const double one : seconds) sum += one;
    if (sum <= most) continue;
    most = sum;
    times.gap_from = place.first;
    times.gap_to = place.second;
    times.gap_s = at_share(seconds, 0.5);
  }
}

}  // namespace

int64_t StepClock::Moment::since(const Moment& earlier) const {
  using std::chrono::microseconds;
  const auto own = (time - earlier.time) - (waited - earlier.waited);
  return std::max<int64_t>(0, std::chrono::duration_cast<microseconds>(own).count());
}

void StepClock::backward_began(Time now, Waited waited) {
  began_ = last_ = {now, waited};
  last_parameter_ = -1;
  longest_ = {};
}

void StepClock::gradient_ready(size_t parameter, Time now, Waited waited) {
  const Moment moment{now, waited};
  const int64_t gap = moment.since(last_);
  const auto index = static_cast<int32_t>(parameter);
  if (gap > longest_.gap) {
    longest_.gap = gap;
    longest_.gap_from = last_parameter_;
    longest_.gap_to = index;
  }
  last_ = moment;
  last_parameter_ = index;
}

StepTimes StepClock::times(Time now, Waited waited) const {
  if (!ended_) return {};
  const Moment moment{now, waited};
  StepTimes times = longest_;
  times.own = std::max<int64_t>(1, moment.since(*ended_));
  times.backward = std::min(times.own, moment.since(began_));
  return times;
}

void StepClock::ended(Time now, Waited waited) { ended_ = Moment{now, waited}; }

void StepHistory::add(const std::vector<StepTimes>& ranks) {
  if (std::any_of(ranks.begin(), ranks.end(), [](const StepTimes& one) { return one.own == 0; }))
    return;
  if (steps_.size() < kSteps) {
    steps_.push_back(ranks);
  } else {
    steps_[next_++ % kSteps] = ranks;
  }
}

StragglerReport StepHistory::report(const std::function<std::string(size_t)>& name) const {
  StragglerReport report;
  report.steps = static_cast<int64_t>(steps_.size());
  if (steps_.empty()) return report;
  const size_t size = steps_.front().size();
  report.ranks.resize(size);
  std::vector<int64_t> last(size);
  for (const std::vector<StepTimes>& step : steps_) {
    const auto longest =
        std::max_element(step.begin(), step.end(),
                         [](const StepTimes& a, const StepTimes& b) { return a.own < b.own; });
    ++last[static_cast<size_t>(longest - step.begin())];
  }
  for (size_t r = 0; r < size; ++r) {
    RankTimes& one = report.ranks[r];
    std::vector<StepTimes> steps;
    std::vector<double> own, before, backward;
    for (const std::vector<StepTimes>& step : steps_) {
      steps.push_back(step[r]);
      own.push_back(static_cast<double>(step[r].own) * kMicro);
      backward.push_back(static_cast<double>(step[r].backward) * kMicro);
      before.push_back(own.back() - backward.back());
    }
    one.own_s = at_share(own, 0.5);
    one.own_p95_s = at_share(own, 0.95);
    one.before_backward_s = at_share(before, 0.5);
    one.backward_s = at_share(backward, 0.5);
    one.last_share = static_cast<double>(last[r]) / static_cast<double>(report.steps);
    find_gap(one, steps);
    if (one.gap_from >= 0) one.gap_from_name = name(static_cast<size_t>(one.gap_from));
    if (one.gap_to >= 0) one.gap_to_name = name(static_cast<size_t>(one.gap_to));
  }
  const auto steps = static_cast<double>(report.steps);
  const double chance = 1 / static_cast<double>(size);
  const double often = steps * chance + kDeviations * std::sqrt(steps * chance * (1 - chance));
  for (size_t r = 0; r < size && size > 1; ++r) {
    RankTimes& one = report.ranks[r];
    one.ratio = one.own_s / median_of(report.ranks, r, &RankTimes::own_s);
    if (report.steps >= kLeastSteps && one.ratio >= kSlower &&
        static_cast<double>(last[r]) > std::min(often, steps - 1))
      report.straggler = static_cast<int64_t>(r);
  }
  return report;
}

}  // namespace detail

}  // namespace apex::parallel
