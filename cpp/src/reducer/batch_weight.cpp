// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/batch_weight.h"

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

namespace apex::parallel::detail {

void BatchWeight::enter(double weight) {
  if (entered_) {
    throw Error(
        "weight() was entered inside another weight(), but a backward has only one set of samples: "
        "exit the first one before");
  }
  number_ = weight;
  entered_ = true;
}

void BatchWeight::enter(const at::Tensor& weight) {
  if (!weight.defined() || weight.numel() != 1 || weight.is_complex() || weight.is_meta() ||
      weight.layout() != at::kStrided) {
    throw InvalidArgument(
        "a weight must be a real number, or a real tensor with one element, got " +
        (weight.defined()
             ? weight.toString() + " with " + std::to_string(weight.numel()) + " elements"
             : std::string("an undefined tensor")));
  }
  if (weight.is_cpu()) return enter(weight.item<double>());
  enter(0);
  number_.reset();
  tensor_ = weight.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
}

void BatchWeight::leave() noexcept {
  entered_ = counted_ = false;
  number_.reset();
  tensor_.reset();
}

bool BatchWeight::backward_began() {
  if (!entered_) return !std::exchange(missing_, true);
  if (std::exchange(counted_, true)) return false;
  if (number_) {
    numbers_.push_back(*number_);
  } else {
    on_device_.push_back(tensor_);
  }
  return true;
}

double BatchWeight::value() const {
  if (missing_) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> all = numbers_;
  for (const at::Tensor& weight : on_device_) all.push_back(weight.item<double>());
  double sum = 0;
  for (const double weight : all) {
    if (!(weight >= 0) || !std::isfinite(weight)) return weight;
    sum += weight;
  }
  return sum;
}

void BatchWeight::reset() {
  numbers_.clear();
  on_device_.clear();
  counted_ = missing_ = false;
}

}  // namespace apex::parallel::detail
