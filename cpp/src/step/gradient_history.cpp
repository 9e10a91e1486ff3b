// SPDX-License-Identifier: BSD-3-Clause
#include "step/gradient_history.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace apex::parallel {

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
/// The weight of one step in the running averages.
constexpr double kShare = 0.05;
/// Outliers are detected after kWarmUp steps. At least kKept numbers, and kWarmUp steps, are kept.
constexpr int64_t kWarmUp = 16;
constexpr size_t kKept = 256;
/// An outlier is off by more than this many standard deviations. Norms are not normally
/// distributed: in a distribution with tails like exp(-|x|), one value in 30,000 exceeds 10.
constexpr double kOff = 10;
/// Ratio of the standard deviation to the median absolute deviation, in a normal distribution.
constexpr double kMedianToDeviation = 1.4826;
/// Lower limit of the standard deviation, as a relative difference, so that small differences are
/// not outliers if the ranks are otherwise almost equal.
constexpr double kLeastDeviation = 0.01;

template <typename Values>
double median(const Values& values) {
  std::vector<double> sorted(values.begin(), values.end());
  if (sorted.empty()) return kUnknown;
  const auto middle = sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (sorted.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(sorted.begin(), middle)) / 2;
}

void keep(std::deque<double>& kept, double value, size_t most) {
  kept.push_back(value);
  if (kept.size() > most) kept.pop_front();
}

/// The standard deviation of a distribution with these absolute deviations.
double deviation(const std::deque<double>& deviations) {
  return std::max(kLeastDeviation, kMedianToDeviation * median(deviations));
}

/// The median of `sorted` without its element `value`; NaN if no element is left.
double median_without(const std::vector<double>& sorted, double value) {
  const size_t count = sorted.size() - 1;
  if (count == 0) return kUnknown;
  const auto out =
      static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), value) - sorted.begin());
  const auto at = [&](size_t i) { return sorted[i < out ? i : i + 1]; };
  return count % 2 == 1 ? at(count / 2) : (at(count / 2 - 1) + at(count / 2)) / 2;
}

}  // namespace

void GradientHistory::add(int64_t backward, const std::vector<RankGradient>& ranks, double squares,
                          double norm) {
  last_ = {};
  last_.backward = backward;
  last_.norm = norm;
  for (const RankGradient& rank : ranks)
    last_.rank_norms.push_back(rank.samples > 0 ? std::sqrt(rank.squares) : kUnknown);
  estimate_noise(ranks, squares);
  find_outliers(ranks);
}

// With W samples in total, w_r of rank r, and the global mean M, the expectations are
//   E |G_r|^2 = |G|^2 + tr(S) / w_r,     E |M|^2 = |G|^2 + tr(S) / W.
// Over n ranks, the mean of |G_r|^2 weighted by w_r / W has the expectation |G|^2 + tr(S) n / W.

void GradientHistory::estimate_noise(const std::vector<RankGradient>& ranks, double squares) {
  double samples = 0, mean = 0, count = 0;
  for (const RankGradient& rank : ranks) {
    if (!(rank.samples > 0)) continue;
    samples += rank.samples;
    mean += rank.samples * rank.squares;
    ++count;
  }
  mean /= samples;
  const bool known = count > 1 && std::isfinite(mean) && std::isfinite(squares);
  last_.noise = known ? samples * (mean - squares) / (count - 1) : kUnknown;
  last_.signal = known ? (count * squares - mean) / (count - 1) : kUnknown;
  if (known) {
    const double share = estimates_++ == 0 ? 1.0 : kShare;
    noise_ += share * (last_.noise - noise_);
    signal_ += share * (last_.signal - signal_);
  }
  last_.noise_scale = estimates_ > 0 && signal_ > 0 ? noise_ / signal_ : kUnknown;
}

void GradientHistory::find_outliers(const std::vector<RankGradient>& ranks) {
  std::vector<double> logs, sorted;
  for (const RankGradient& rank : ranks) {
    logs.push_back(rank.samples > 0 && rank.squares > 0 ? std::log(rank.squares) / 2 : kUnknown);
    if (std::isfinite(logs.back())) sorted.push_back(logs.back());
  }
  std::sort(sorted.begin(), sorted.end());
  const size_t most = std::max(kKept, static_cast<size_t>(kWarmUp) * ranks.size());
  const double before = median(levels_);
  const double of_others = deviation(from_others_), of_before = deviation(from_before_);
  last_.z_scores.assign(ranks.size(), 0);
  for (size_t r = 0; r < ranks.size(); ++r) {
    double& score = last_.z_scores[r];
    bool off = ranks[r].samples > 0 && !std::isfinite(ranks[r].squares);
    if (std::isfinite(logs[r])) {
      const double off_before = logs[r] - before;
      const double others = median_without(sorted, logs[r]);
      const double off_others = std::isnan(others) ? off_before : logs[r] - others;
      if (steps_ >= kWarmUp) {
        const double one = off_others / of_others, two = off_before / of_before;
        score = std::abs(one) < std::abs(two) ? one : two;
        off = std::abs(score) > kOff;
      }
      keep(levels_, logs[r], most);
      if (std::isfinite(off_others)) keep(from_others_, std::abs(off_others), most);
      if (std::isfinite(off_before)) keep(from_before_, std::abs(off_before), most);
    }
    if (off) last_.outliers.push_back(static_cast<int64_t>(r));
  }
  if (!sorted.empty()) ++steps_;
}

}  // namespace apex::parallel
