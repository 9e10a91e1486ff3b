// SPDX-License-Identifier: BSD-3-Clause
#include "c_api/notified_reducer.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <apex/error.h>

#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

namespace {

void require_gradients_fit(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor &parameter = parameters[i], &gradient = gradients[i];
    if (at::isFloatingType(gradient.scalar_type()) && gradient.sizes() == parameter.sizes() &&
        gradient.scalar_type() == parameter.scalar_type() &&
        gradient.device() == parameter.device() &&
        at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
      continue;
    }
    throw InvalidArgument("gradient " + std::to_string(i) +
                          " must have the shape, device and floating-point dtype of its parameter, "
                          "and its elements must not overlap in memory (no stride 0)");
  }
}

}  // namespace

NotifiedReducer::NotifiedReducer(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 const std::vector<at::Tensor>& parameters,
                                 std::vector<at::Tensor> gradients, int64_t bucket_bytes,
                                 bool weighted)
    : gradients_(std::move(gradients)) {
  if (bucket_bytes < 0) {
    throw InvalidArgument("bucket_bytes must not be negative, got " + std::to_string(bucket_bytes));
  }
  require_gradients_fit(parameters, gradients_);
  std::vector<NamedTensor> named;
  for (const at::Tensor& parameter : parameters) {
    variables_.push_back(parameter.detach().requires_grad_());
    named.push_back({"parameter " + std::to_string(named.size()), variables_.back()});
  }
  ReducerOptions options;
  options.limits.cap = bucket_bytes;
  options.limits.unit = BucketLimits::Unit::kBytes;
  options.weighted = weighted;
  options.check_steps = false;  // the caller's writes are not detected
  core_ = std::make_shared<ReducerCore>(std::move(named), std::vector<GroupPtr>{std::move(group)},
                                        std::move(options));
  core_->begin();
}

NotifiedReducer::~NotifiedReducer() {
  if (ready_.empty()) return;
  try {
    synchronize();  // the other ranks wait for this one
  } catch (const std::exception&) {
    // These gradients are no longer needed.
  }
}

void NotifiedReducer::set_weight(double weight) {
  core_->between_backwards("apex_reducer_set_weight()", [&](ReducerState& state) {
    if (!state.context.options.weighted)
      throw InvalidArgument(
          "the reducer is not weighted: create it with apex_reducer_create_weighted()");
    state.reporter.weight.leave();
    state.reporter.weight.enter(weight);
  });
}

void NotifiedReducer::begin_step() {
  // A second tensor on the same memory. The engine reduces a gradient in place only if it holds the
  // only reference to its memory. The caller's memory may be freed before a failed exchange is
  // over.
  for (size_t i = 0; i < gradients_.size(); ++i)
    variables_[i].mutable_grad() = gradients_[i].detach();
  core_->begin_by_hand();
  ready_.assign(gradients_.size(), false);
}

void NotifiedReducer::gradient_ready(size_t index) {
  if (index >= gradients_.size()) {
    throw InvalidArgument("gradient " + std::to_string(index) +
                          " does not exist: the reducer has " + std::to_string(gradients_.size()));
  }
  if (ready_.empty()) begin_step();
  if (ready_[index]) {
    throw InvalidArgument("gradient " + std::to_string(index) +
                          " was reported twice; call apex_reducer_synchronize() between two steps");
  }
  ready_[index] = true;
  core_->gradient_ready(index, {});
}

void NotifiedReducer::synchronize() {
  const at::NoGradGuard no_grad;
  if (gradients_.empty()) return;
  if (ready_.empty()) begin_step();
  const std::vector<bool> ready = std::exchange(ready_, {});
  for (size_t i = 0; i < ready.size(); ++i) {
    if (!ready[i]) variables_[i].mutable_grad() = at::Tensor();  // the engine takes zeros for it
  }
  // The weight was used when the step began, and must not apply to the next step.
  core_->change([](ReducerState& state) { state.reporter.weight.leave(); });
  core_->end_by_hand();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& average = variables_[i].grad();
    if (!average.defined()) {
      gradients_[i].zero_();  // no rank announced it
    } else if (!average.is_alias_of(gradients_[i])) {
      gradients_[i].copy_(average);
    }
  }
}

}  // namespace apex::parallel::detail
