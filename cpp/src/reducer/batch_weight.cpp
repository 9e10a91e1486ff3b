// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/batch_weight.h"

#include <limits>

#include <ATen/Functions.h>

#include <apex/error.h>

namespace apex::parallel::detail {

void BatchWeight::enter(const at::Tensor& weight) {
  if (entered_) {
    throw Error(
        "weight() inside of another weight(): the gradients of a backward are of one set of "
        "samples. Leave the first one before");
  }
  if (!weight.defined() || weight.numel() != 1 || weight.is_complex()) {
    throw InvalidArgument("a weight is a real number or a tensor with one, got " +
                          (weight.defined() ? weight.toString() + " with " +
                                                  std::to_string(weight.numel()) + " elements"
                                            : std::string("an undefined tensor")));
  }
  if (weight.is_cpu()) {
    number_ = weight.item<double>();
  } else {
    tensor_ = weight.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
  }
  entered_ = true;
}

void BatchWeight::leave() noexcept {
  entered_ = counted_ = false;
  number_.reset();
  tensor_.reset();
}

void BatchWeight::backward_began() {
  if (!entered_) {
    missing_ = true;
  } else if (!counted_) {
    counted_ = true;
    if (number_) {
      sum_ += *number_;
    } else {
      on_device_.push_back(tensor_);
    }
  }
}

double BatchWeight::value() const {
  if (missing_) return std::numeric_limits<double>::quiet_NaN();
  double sum = sum_;
  for (const at::Tensor& weight : on_device_) sum += weight.item<double>();
  return sum;
}

void BatchWeight::reset() {
  sum_ = 0;
  on_device_.clear();
  counted_ = missing_ = false;
}

}  // namespace apex::parallel::detail
