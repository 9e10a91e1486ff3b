// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/gradient_meter.h"

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Functions.h>

#include "fingerprint.h"
#include "reducer/multi_tensor.h"
#include "tensor_parts.h"

namespace apex::parallel::detail {

void GradientMeter::measure_own(const std::vector<PlannedBucket>& entries, StepReport& report) {
  const ReducerOptions& options = context_.options;
  if (!options.check_finite && !options.gradient_statistics) return;
  const size_t count = context_.parameters.size();
  own_.assign(count, 0);
  reduced_.assign(count, 0);
  buckets_.assign(count, -1);
  on_device_.clear();
  values_.clear();
  for (const PlannedBucket& entry : entries) {
    const std::vector<double> squares = entry.message.own_squares();
    for (size_t i = 0; i < squares.size(); ++i)
      own_[entry.message.slots()[i].parameter] = squares[i];
  }
  for (size_t i = 0; i < count; ++i) {
    report.squares += own_[i];
    if (options.check_finite && report.non_finite < 0 && !std::isfinite(own_[i]))
      report.non_finite = static_cast<int64_t>(i);
  }
}

void GradientMeter::add_reduced(const std::vector<BucketMessage::Slot>& slots, int64_t bucket) {
  if (!context_.options.gradient_statistics) return;
  for (const BucketMessage::Slot& slot : slots) {
    const auto parameter = static_cast<size_t>(slot.parameter);
    buckets_[parameter] = bucket;
    reduced_[parameter] = slot.squares;
    at::Tensor grad = slot.variable.grad();
    if (slot.variable.is_cpu() || !grad.defined()) continue;
    if (grad.layout() == at::kSparse) grad = grad._values();
    if (grad.numel() == 0) continue;
    on_device_.push_back(slot.parameter);
    values_.push_back(in_memory(grad.detach()));
  }
}

void GradientMeter::read_devices() {
  if (values_.empty()) return;
  std::vector<at::Tensor> norms = norms_of(values_);
  for (at::Tensor& norm : norms) norm = norm.to(norms.front().device());
  const at::Tensor squares = at::stack(norms).square().cpu();
  for (size_t i = 0; i < on_device_.size(); ++i)
    reduced_[static_cast<size_t>(on_device_[i])] = squares.const_data_ptr<double>()[i];
  values_.clear();
  on_device_.clear();
}

void GradientMeter::read_kept(const std::vector<PlannedBucket>& entries, const StepTable& table) {
  kept_.assign(static_cast<size_t>(context_.members.size), 0);
  for (const PlannedBucket& entry : entries) {
    const std::vector<double> squares = entry.message.kept_squares();
    if (squares.empty()) continue;
    const auto parameter = static_cast<size_t>(entry.message.slots().front().parameter);
    for (size_t rank = 0; rank < kept_.size(); ++rank) {
      if (!table.used(rank, parameter)) continue;  // as in own_squares()
      kept_[rank] += squares[rank];
      if (rank == static_cast<size_t>(context_.members.rank)) own_[parameter] += squares[rank];
    }
  }
}

void GradientMeter::conclude(const StepTable& table, bool skipped) {
  const ReducerOptions& options = context_.options;
  if (!options.gradient_statistics) return;
  read_devices();
  double count = 0;
  std::vector<RankGradient> ranks;
  for (int rank = 0; rank < context_.members.size; ++rank) {
    const StepReport& report = table.of(static_cast<size_t>(rank));
    RankGradient gradient{report.squares + kept_[static_cast<size_t>(rank)],
                          report.without_data ? 0.0 : 1.0};
    if (options.weighted) {
      gradient.samples = report.weight > 0 ? report.weight : 0;
      gradient.squares /= gradient.samples * gradient.samples;
    }
    if (gradient.samples > 0) ++count;
    ranks.push_back(gradient);
  }
  double squares = 0;
  for (const double one : reduced_) squares += one;
  if (options.weighted && context_.total_weight == 0) squares = 0;  // cleared
  if (skipped) squares = std::numeric_limits<double>::quiet_NaN();
  const double divided = options.gradient_average ? static_cast<double>(context_.divisor) : 1.0;
  const double to_mean = options.weighted ? 1.0 : divided / count;
  history_.add(context_.backward_number, ranks, squares * to_mean * to_mean, std::sqrt(squares));
  norms_.resize(own_.size());
  for (size_t i = 0; i < own_.size(); ++i) {
    norms_[i].bucket = buckets_[i];
    norms_[i].norm = skipped ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(reduced_[i]);
    norms_[i].own = std::sqrt(own_[i]);
  }
  samples_.clear();
  for (size_t i = 0; i < own_.size(); ++i) samples_.push_back(sample(i));
}

/// A fingerprint of a few elements of a gradient, which detects that the gradient was scaled.
/// GradScaler.unscale_() does not change its version. 0 if the gradient cannot be read.
int64_t GradientMeter::sample(size_t parameter) const {
  const at::Tensor& grad = context_.parameters[parameter].variable.grad();
  if (!grad.defined() || !grad.is_cpu() || grad.layout() != at::kStrided || !has_memory(grad) ||
      !grad.is_non_overlapping_and_dense() || grad.numel() == 0) {
    return 0;
  }
  const auto* const memory = static_cast<const char*>(grad.const_data_ptr());
  const auto size = static_cast<int64_t>(grad.element_size());
  Fingerprint elements;
  for (const int64_t at : {int64_t{0}, grad.numel() / 3, grad.numel() / 2, grad.numel() - 1})
    elements.add(memory + at * size, static_cast<size_t>(size));
  return elements.value();
}

std::optional<double> GradientMeter::norm() const {
  const GradientStatistics& last = statistics();
  if (last.backward == 0 || last.backward != context_.backward_number) return std::nullopt;
  for (size_t i = 0; i < norms_.size(); ++i) {
    const Parameter& one = context_.parameters[i];
    if (!one.variable.grad().defined()) {
      if (norms_[i].norm > 0) return std::nullopt;  // cleared since
      continue;
    }
    // A gradient without a norm was not changed by the backward.
    const bool same =
        one.holds_reduced() && norms_[i].norm > 0 && samples_[i] != 0 && samples_[i] == sample(i);
    if (!same) return std::nullopt;
  }
  return last.norm;
}

std::vector<ParameterNorms> GradientMeter::norms() const {
  std::vector<ParameterNorms> named = norms_;
  for (size_t i = 0; i < named.size(); ++i) named[i].name = context_.parameters[i].name;
  return named;
}

}  // namespace apex::parallel::detail
