#include "reducer/bucket_tuner.h"

#include <algorithm>
#include <utility>

namespace apex::parallel {

namespace {

constexpr double kNoise = 0.03;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void BucketTuner::reset(size_t parameters) {
  phase_ = Phase::kObserve;
  steps_ = 0;
  current_ = 0;
  ready_.assign(parameters, {});
  candidates_.clear();
  times_.assign(1, {});
}

void BucketTuner::keep(const BucketPlan& plan) {
  candidates_ = {plan};
  times_.assign(1, {});
  decide({});
}

void BucketTuner::gradient_at(size_t parameter, double seconds) {
  ready_[parameter].push_back(seconds);
}

BucketTuner::Ask BucketTuner::backward_took(double seconds) {
  const int64_t step = steps_++;
  if (phase_ == Phase::kKeep) {
    if (steps_ < kPatience) return Ask::kNothing;
    reset(ready_.size());
    return Ask::kNothing;
  }
  if (step > 0) times_[current_].push_back(seconds);
  if (steps_ < kSteps) return Ask::kNothing;
  if (phase_ == Phase::kObserve) return Ask::kPropose;
  if (current_ + 1 == candidates_.size()) return Ask::kDecide;
  ++current_;
  steps_ = 0;
  return Ask::kSwitch;
}

std::vector<double> BucketTuner::ready_s() const {
  std::vector<double> result;
  result.reserve(ready_.size());
  for (const auto& times : ready_) result.push_back(median(times));
  return result;
}

BucketTuner::Ask BucketTuner::propose(std::vector<BucketPlan> candidates) {
  candidates_ = std::move(candidates);
  times_.resize(candidates_.size());
  phase_ = Phase::kTry;
  if (candidates_.size() < 2) return Ask::kDecide;
  current_ = 1;
  steps_ = 0;
  return Ask::kSwitch;
}

std::vector<double> BucketTuner::medians() const {
  std::vector<double> result;
  for (const auto& times : times_) result.push_back(median(times));
  return result;
}

void BucketTuner::decide(const std::vector<double>& seconds) {
  const auto best = std::min_element(seconds.begin(), seconds.end());
  const bool faster = best != seconds.end() && *best < (1.0 - kNoise) * seconds.front();
  current_ = faster ? static_cast<size_t>(best - seconds.begin()) : 0;
  steps_ = 0;
  phase_ = Phase::kKeep;
}

}  // namespace apex::parallel
