// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/overlapped_optimizer.h>

#include <exception>
#include <string>
#include <utility>

#include <torch/types.h>

#include <apex/error.h>

#include "optim/step_notice.h"

namespace apex::parallel {

namespace {

void clear(at::Tensor parameter, bool set_to_none) {
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined()) return;
  if (set_to_none) {
    grad.reset();
  } else {
    grad.detach_().zero_();
  }
}

}  // namespace

OverlappedOptimizer::OverlappedOptimizer(torch::optim::Optimizer& optimizer, Reducer& reducer)
    : optimizer_(optimizer), reducer_(reducer) {
  // A second one would replace the callback of the first, and updates of the first would be lost.
  if (reducer.deferred()) {
    throw InvalidArgument(
        "OverlappedOptimizer: this reducer already has an OverlappedOptimizer (or set_deferred() "
        "was called), and can have only one: put all parameters into the groups of one optimizer.");
  }
  const auto& parameters = reducer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    index_[parameters[i].tensor.unsafeGetTensorImpl()] = static_cast<int64_t>(i);
  }
  reducer_.set_deferred(true);
  reducer_.set_bucket_callback([this](const ReducedBucket& bucket) { arrived(bucket); });
}

OverlappedOptimizer::~OverlappedOptimizer() {
  try {
    reducer_.wait();
    reducer_.set_bucket_callback(nullptr);
    reducer_.set_deferred(false);
  } catch (const std::exception&) {
    // The group is broken, and the next wait throws.
    try {
      reducer_.set_bucket_callback(nullptr);
    } catch (const std::exception&) {
    }
  }
}

OverlappedOptimizer::Settings OverlappedOptimizer::settings() const {
  Settings settings;
  for (const auto& group : optimizer_.param_groups()) settings.push_back(group.options().clone());
  return settings;
}

OverlappedOptimizer::Tensors OverlappedOptimizer::in_flight() const {
  Tensors tensors;
  for (const int64_t i : reducer_.in_flight()) {
    tensors.insert(reducer_.parameters()[i].tensor.unsafeGetTensorImpl());
  }
  return tensors;
}

/// Steps only these parameters, with these options of the groups (nullptr: the current options).
void OverlappedOptimizer::update(const Tensors& parameters, const Settings* settings) {
  auto& groups = optimizer_.param_groups();
  if (settings != nullptr && settings->size() != groups.size()) {
    throw Error(
        "a parameter group was added while the last step of an OverlappedOptimizer is in flight: "
        "call synchronize() first");
  }
  std::vector<std::vector<at::Tensor>> all;
  Settings present;
  for (size_t g = 0; g < groups.size(); ++g) {
    all.push_back(groups[g].params());
    std::vector<at::Tensor> some;
    for (const at::Tensor& parameter : all.back()) {
      if (parameters.count(parameter.unsafeGetTensorImpl()) != 0) some.push_back(parameter);
    }
    groups[g].params() = std::move(some);
    if (settings == nullptr) continue;
    present.push_back(groups[g].options().clone());
    groups[g].set_options((*settings)[g]->clone());
  }
  const auto restore = [&] {
    for (size_t g = 0; g < groups.size(); ++g) {
      groups[g].params() = std::move(all[g]);
      if (settings != nullptr) groups[g].set_options(std::move(present[g]));
    }
  };
  try {
    const detail::StepInParts part;
    optimizer_.step();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

void OverlappedOptimizer::arrived(const ReducedBucket& bucket) {
  if (!later_) return;
  Tensors due;
  std::vector<at::Tensor> tensors;
  for (const int64_t i : bucket.parameters) {
    const NamedTensor& parameter = reducer_.parameters()[i];
    if (later_->parameters.erase(parameter.tensor.unsafeGetTensorImpl()) == 0) continue;
    if (!parameter.tensor.grad().defined()) {
      throw Error("the gradient of parameter '" + parameter.name +
                  "' was cleared while its all-reduce was in flight, so its update is lost: clear "
                  "gradients with OverlappedOptimizer::zero_grad()");
    }
    due.insert(parameter.tensor.unsafeGetTensorImpl());
    tensors.push_back(parameter.tensor);
  }
  if (due.empty()) return;
  update(due, &later_->settings);
  if (later_->clear) {
    for (const at::Tensor& tensor : tensors) clear(tensor, *later_->clear);
  }
  if (later_->parameters.empty()) later_.reset();
}

void OverlappedOptimizer::step() {
  if (later_) synchronize();
  Tensors waiting = in_flight();
  Tensors rest;
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) rest.insert(parameter.unsafeGetTensorImpl());
  }
  Tensors later;
  for (const auto* parameter : waiting) {
    if (rest.erase(parameter) != 0) later.insert(parameter);
  }
  if (later.empty()) {
    const detail::StepInParts part;
    optimizer_.step();
  } else {
    later_ = Later{std::move(later), settings(), std::nullopt};
    update(rest, nullptr);
  }
  detail::report_step(optimizer_, detail::Reporter::kItself);
}

void OverlappedOptimizer::zero_grad(bool set_to_none) {
  Tensors waiting = in_flight();
  if (!waiting.empty() && !later_) {  // step() was not called, so these gradients are not used
    synchronize();
    waiting.clear();
  }
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (waiting.count(parameter.unsafeGetTensorImpl()) == 0) clear(parameter, set_to_none);
    }
  }
  if (!waiting.empty()) later_->clear = set_to_none;
}

void OverlappedOptimizer::wait_for(const std::vector<at::Tensor>& parameters) {
  std::vector<int64_t> indices;
  for (const at::Tensor& parameter : parameters) {
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    if (found != index_.end()) indices.push_back(found->second);
  }
  reducer_.wait_for(indices);
}

void OverlappedOptimizer::synchronize() { reducer_.wait(); }

void OverlappedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  reducer_.wait();
  optimizer_.save(archive);
}

void OverlappedOptimizer::load(torch::serialize::InputArchive& archive) {
  reducer_.wait();
  optimizer_.load(archive);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const OverlappedOptimizer& optimizer) {
  optimizer.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           OverlappedOptimizer& optimizer) {
  optimizer.load(archive);
  return archive;
}

}  // namespace apex::parallel
