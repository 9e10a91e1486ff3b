// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/finite_check.h"

#include <cmath>

#include <ATen/Functions.h>

#include "reducer/multi_tensor.h"

namespace apex::parallel::detail {

void FiniteCheck::backward_began() {
  first_ = -1;
  on_device_.clear();
}

void FiniteCheck::found(int64_t parameter) {
  if (first_ < 0 || parameter < first_) first_ = parameter;
}

void FiniteCheck::look(const BucketMessage& message) {
  const at::Tensor all = message.gradients_of(message.tensor());
  const bool on_cpu = message.device().is_cpu();
  // A sum of finite values may overflow, so it only tells where to look.
  if (on_cpu && at::isfinite(all.sum()).item<bool>()) return;
  const std::vector<at::Tensor> views = message.views_of(all);
  std::vector<int64_t> parameters;
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < views.size(); ++i) {
    const BucketMessage::Slot& slot = message.slots()[i];
    if (!slot.used || views[i].numel() == 0) continue;
    if (!on_cpu) {
      parameters.push_back(slot.parameter);
      values.push_back(views[i]);
    } else if (!at::isfinite(views[i]).all().item<bool>()) {
      found(slot.parameter);
    }
  }
  if (values.empty()) return;
  on_device_.emplace_back(std::move(parameters), at::stack(max_norms_of(values)));
}

void FiniteCheck::look(int64_t parameter, const at::Tensor& gradient) {
  at::Tensor values = gradient.detach();
  if (values.layout() == at::kSparse) values = values._values();
  if (values.numel() == 0) return;
  if (!values.is_cpu()) {
    on_device_.emplace_back(std::vector<int64_t>{parameter}, at::stack(max_norms_of({values})));
  } else if (!at::isfinite(values).all().item<bool>()) {
    found(parameter);
  }
}

int64_t FiniteCheck::first() {
  for (const auto& [parameters, largest] : on_device_) {
    const at::Tensor read = largest.cpu();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!std::isfinite(read.const_data_ptr<double>()[i])) found(parameters[i]);
    }
  }
  on_device_.clear();
  return first_;
}

}  // namespace apex::parallel::detail
