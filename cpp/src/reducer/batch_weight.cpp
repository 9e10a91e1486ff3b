// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/batch_weight.h"

#include <cmath>
#include <limits>

#include <ATen/Functions.h>

#include <apex/error.h>

namespace apex::parallel::detail {

void BatchWeight::enter(const at::Tensor& weight) {
  if (entered_.defined()) {
    throw Error(
        "weight() was entered inside another weight(), but a backward has only one set of samples: "
        "exit the first one before");
  }
  if (!weight.defined() || weight.numel() != 1 || weight.is_complex() || weight.is_meta() ||
      weight.layout() != at::kStrided) {
    throw InvalidArgument(
        "a weight must be a real number, or a real tensor with one element, got " +
        (weight.defined()
             ? weight.toString() + " with " + std::to_string(weight.numel()) + " elements"
             : std::string("an undefined tensor")));
  }
  entered_ = weight.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
}

void BatchWeight::leave() noexcept {
  counted_ = false;
  entered_.reset();
}

bool BatchWeight::backward_began() {
  if (has_counted()) return false;
  (entered_.defined() ? counted_ : missing_) = true;
  if (entered_.defined()) weights_.push_back(entered_);
  return true;
}

double BatchWeight::value() const {
  if (missing_) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (const at::Tensor& one : weights_) {
    const auto weight = one.item<double>();
    if (!(weight >= 0) || !std::isfinite(weight)) return weight;
    sum += weight;
  }
  return sum;
}

void BatchWeight::reset() {
  weights_.clear();
  counted_ = missing_ = false;
}

}  // namespace apex::parallel::detail
