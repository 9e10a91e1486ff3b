// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/overlap_report.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include <apex/error.h>

namespace apex::parallel {

namespace {

struct Interval {
  double begin;
  double end;
};

using Intervals = std::vector<Interval>;

/// The union of the intervals, as sorted intervals that do not touch.
Intervals united(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& left, const Interval& right) { return left.begin < right.begin; });
  Intervals result;
  for (const Interval& interval : intervals) {
    if (result.empty() || interval.begin > result.back().end) {
      result.push_back(interval);
    } else {
      result.back().end = std::max(result.back().end, interval.end);
    }
  }
  return result;
}

/// The duration of the intersection; both arguments are results of united().
double seconds_in_both(const Intervals& left, const Intervals& right) {
  double seconds = 0;
  for (size_t l = 0, r = 0; l < left.size() && r < right.size();) {
    seconds += std::max(
        0.0, std::min(left[l].end, right[r].end) - std::max(left[l].begin, right[r].begin));
    if (left[l].end < right[r].end) {
      ++l;
    } else {
      ++r;
    }
  }
  return seconds;
}

void check(double last_gradient_s, double backward_s, const std::vector<BucketOverlap>& buckets) {
  if (!std::isfinite(backward_s) || !(last_gradient_s <= backward_s) ||
      !std::isfinite(last_gradient_s)) {
    throw InvalidArgument("overlap: backward computed its last gradient at " +
                          std::to_string(last_gradient_s) + " s, and ended at " +
                          std::to_string(backward_s) + " s");
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    const BucketOverlap& bucket = buckets[b];
    const bool ordered =
        bucket.ready_s <= bucket.launched_s && bucket.launched_s <= bucket.arrived_s;
    if (ordered && std::isfinite(bucket.ready_s) && std::isfinite(bucket.arrived_s) &&
        std::isfinite(bucket.awaited_s)) {
      continue;
    }
    throw InvalidArgument("overlap: bucket " + std::to_string(b) + " was ready at " +
                          std::to_string(bucket.ready_s) + " s, launched at " +
                          std::to_string(bucket.launched_s) + " s, complete at " +
                          std::to_string(bucket.arrived_s) + " s, awaited at " +
                          std::to_string(bucket.awaited_s) + " s");
  }
}

constexpr double kMilli = 1e3;
constexpr double kMebi = 1 << 20;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void append(std::string& text, const char* format, ...) {
  char line[160];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  text += line;
}

std::string members_of(const BucketOverlap& bucket) {
  if (bucket.names.empty()) return std::to_string(bucket.parameters.size()) + " parameters";
  if (bucket.names.size() == 1) return bucket.names.front();
  return bucket.names.front() + " to " + bucket.names.back() + " (" +
         std::to_string(bucket.names.size()) + ")";
}

}  // namespace

OverlapReport summarize_overlap(double last_gradient_s, double backward_s,
                                std::vector<BucketOverlap> buckets, OverlapClock clock) {
  check(last_gradient_s, backward_s, buckets);
  OverlapReport report;
  report.clock = clock;
  report.last_gradient_s = last_gradient_s;
  report.backward_s = backward_s;
  Intervals flights;
  Intervals idle{{last_gradient_s, backward_s}};
  for (const BucketOverlap& bucket : buckets) {
    flights.push_back({bucket.launched_s, bucket.arrived_s});
    // Buckets of a deferred backward are hidden by the next forward until it waits for them.
    const double waits_from = std::max(bucket.awaited_s, backward_s);
    if (waits_from < bucket.arrived_s) idle.push_back({waits_from, bucket.arrived_s});
  }
  flights = united(std::move(flights));
  idle = united(std::move(idle));
  for (const Interval& flight : flights) report.communication_s += flight.end - flight.begin;
  report.exposed_s = seconds_in_both(flights, idle);
  report.hidden_s = std::max(0.0, report.communication_s - report.exposed_s);
  if (report.communication_s > 0) report.hidden_fraction = report.hidden_s / report.communication_s;
  for (BucketOverlap& bucket : buckets) {
    bucket.exposed_s = seconds_in_both({{bucket.launched_s, bucket.arrived_s}}, idle);
  }
  report.buckets = std::move(buckets);
  return report;
}

std::string to_string(const OverlapReport& report) {
  std::string text;
  double bytes = 0;
  for (const BucketOverlap& bucket : report.buckets) bytes += static_cast<double>(bucket.bytes);
  append(text, "backward %.2f ms, last gradient after %.2f ms", report.backward_s * kMilli,
         report.last_gradient_s * kMilli);
  if (report.clock == OverlapClock::kDevice) text += " (device times)";
  if (report.clock == OverlapClock::kHostOnly) {
    text += " (times of the host's calls, not of the device)";
  }
  text += '\n';
  append(
      text,
      "%zu bucket%s, %.2f MiB, in flight for %.2f ms: %.2f ms hidden (%.0f %%), %.2f ms exposed\n",
      report.buckets.size(), report.buckets.size() == 1 ? "" : "s", bytes / kMebi,
      report.communication_s * kMilli, report.hidden_s * kMilli, report.hidden_fraction * 100,
      report.exposed_s * kMilli);
  append(text, "%6s %9s %9s %9s %9s %9s %9s  %s\n", "bucket", "MiB", "ready", "launched", "arrived",
         "in flight", "exposed", "parameters");
  for (size_t b = 0; b < report.buckets.size(); ++b) {
    const BucketOverlap& bucket = report.buckets[b];
    append(text, "%6zu %9.3f %9.2f %9.2f %9.2f %9.2f %9.2f  ", b,
           static_cast<double>(bucket.bytes) / kMebi, bucket.ready_s * kMilli,
           bucket.launched_s * kMilli, bucket.arrived_s * kMilli,
           (bucket.arrived_s - bucket.launched_s) * kMilli, bucket.exposed_s * kMilli);
    text += members_of(bucket) + '\n';
  }
  return text;
}

}  // namespace apex::parallel
