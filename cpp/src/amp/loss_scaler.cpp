// SPDX-License-Identifier: BSD-3-Clause
#include <apex/amp.h>

#include <algorithm>
#include <cmath>
#include <string>

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <apex/error.h>

#include "comm/collectives.h"

namespace apex::amp {

namespace {

using DeviceKey = std::pair<c10::DeviceType, c10::DeviceIndex>;

DeviceKey key_of(at::Device device) { return {device.type(), device.index()}; }

void require(bool condition, const std::string& message) {
  if (!condition) throw InvalidArgument("LossScaler: " + message);
}

/// Checks the value as float32, the dtype of the scale.
bool is_positive(double value) {
  const auto scale = static_cast<float>(value);
  return std::isfinite(scale) && scale > 0;
}

void check(const LossScalerOptions& options) {
  require(is_positive(options.init_scale()), "init_scale is " +
                                                 std::to_string(options.init_scale()) +
                                                 "; it must be positive and finite.");
  require(std::isfinite(options.growth_factor()) && options.growth_factor() > 1,
          "growth_factor is " + std::to_string(options.growth_factor()) + "; it must be above 1.");
  require(options.backoff_factor() > 0 && options.backoff_factor() < 1,
          "backoff_factor is " + std::to_string(options.backoff_factor()) +
              "; it must be between 0 and 1.");
  require(options.growth_interval() >= 1 && options.growth_interval() <= INT32_MAX,
          "growth_interval is " + std::to_string(options.growth_interval()) +
              "; it must be between 1 and 2^31 - 1.");
  require(!options.min_scale() || is_positive(*options.min_scale()),
          "min_scale must be positive and finite.");
  require(!options.max_scale() || is_positive(*options.max_scale()),
          "max_scale must be positive and finite.");
  require(!options.max_scale() || options.init_scale() <= *options.max_scale(),
          "init_scale is above max_scale.");
  require(
      !options.min_scale() || !options.max_scale() || *options.min_scale() <= *options.max_scale(),
      "min_scale is above max_scale; swap them.");
}

/// The values to multiply: a sparse gradient's stored elements, else the gradient itself.
at::Tensor values_of(const at::Tensor& grad) {
  require(at::isFloatingType(grad.scalar_type()), std::string("a gradient has dtype ") +
                                                      c10::toString(grad.scalar_type()) +
                                                      "; only floating gradients can be unscaled.");
  require(!grad.is_meta(), "a gradient is on the meta device, where it has no values.");
  if (!grad.is_sparse()) return grad;
  require(grad.is_coalesced(), "a sparse gradient is not coalesced; call coalesce() on it first.");
  return grad._values();
}

/// `tensor` on `device`. A copy to the host is blocking, because the host reads it next.
at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

struct LikeKind {
  bool operator()(const at::Tensor& a, const at::Tensor& b) const {
    const auto rank = [](const at::Tensor& t) {
      return std::make_pair(key_of(t.device()), t.scalar_type());
    };
    return rank(a) < rank(b);
  }
};

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  check(options_);
  scale_ = at::full({1}, options_.init_scale(), at::kFloat);
  growth_tracker_ = at::zeros({1}, at::kInt);
}

LossScaler::~LossScaler() = default;

void LossScaler::move_to(at::Device device) {
  if (scale_.device() == device) return;
  scale_ = on_device(scale_, device);
  growth_tracker_ = on_device(growth_tracker_, device);
}

at::Tensor LossScaler::scale(const at::Tensor& loss) {
  require(loss.defined(), "scale() was given an undefined loss; compute it first.");
  // Otherwise the scale would move to the meta device and lose its value.
  require(!loss.is_meta(), "scale() was given a loss on the meta device, which has no value.");
  {
    at::NoGradGuard no_grad;
    move_to(loss.device());
  }
  // A copy, because autograd saves the factor and update() writes to scale_.
  return loss.to(at::kFloat) * scale_.clone().squeeze(0);
}

at::Tensor& LossScaler::found_inf_on(at::Device device) {
  at::Tensor& flag = found_inf_[key_of(device)];
  if (!flag.defined()) flag = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  return flag;
}

void LossScaler::unscale_(const std::vector<at::Tensor>& grads) {
  at::NoGradGuard no_grad;
  std::map<at::Tensor, std::vector<at::Tensor>, LikeKind> groups;
  for (const at::Tensor& grad : grads) {
    if (!grad.defined()) continue;
    at::Tensor values = values_of(grad);
    if (values.numel() > 0) groups[values].push_back(std::move(values));
  }
  if (groups.empty()) return;
  if (scale_.is_cpu()) move_to(groups.begin()->first.device());
  const at::Tensor inverse = scale_.reciprocal();
  for (const auto& [kind, group] : groups) {
    const at::Tensor factor = on_device(inverse, kind.device());
    if (options_.dynamic()) {
      at::_amp_foreach_non_finite_check_and_unscale_(group, found_inf_on(kind.device()), factor);
    } else {
      at::_foreach_mul_(group, factor.squeeze(0));
    }
  }
}

void LossScaler::unscale_(torch::optim::Optimizer& optimizer) {
  require(stages_.count(&optimizer) == 0,
          "the gradients of this optimizer were already unscaled since the last update(); call "
          "update() once after every step.");
  std::vector<at::Tensor> grads;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) grads.push_back(parameter.grad());
  }
  unscale_(grads);
  stages_.emplace(&optimizer, Stage::kUnscaled);
}

bool LossScaler::step(torch::optim::Optimizer& optimizer) {
  return step(optimizer, [&] { optimizer.step(); });
}

bool LossScaler::step(torch::optim::Optimizer& optimizer, const std::function<void()>& step) {
  if (stages_.count(&optimizer) == 0) unscale_(optimizer);
  Stage& stage = stages_.at(&optimizer);
  require(stage == Stage::kUnscaled,
          "step() was called twice for this optimizer; call update() once after every step.");
  stage = Stage::kStepped;
  if (options_.dynamic() && overflowed()) return false;
  step();
  return true;
}

void LossScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", scale_.cpu(), /*is_buffer=*/true);
  archive.write("growth_tracker", growth_tracker_.cpu(), /*is_buffer=*/true);
}

void LossScaler::load(torch::serialize::InputArchive& archive) {
  at::Tensor scale, count;
  require(archive.try_read("scale", scale, /*is_buffer=*/true) &&
              archive.try_read("growth_tracker", count, /*is_buffer=*/true) && scale.numel() == 1 &&
              count.numel() == 1,
          "the archive does not hold a loss scaler; load what torch::save(scaler, ...) wrote.");
  const auto clean_updates = count.item<int64_t>();
  set_scale(scale.item<double>());
  set_growth_tracker(clean_updates);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const LossScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           LossScaler& scaler) {
  scaler.load(archive);
  return archive;
}

at::Tensor LossScaler::found_inf() const {
  at::NoGradGuard no_grad;
  at::Tensor found = at::zeros_like(scale_);
  for (const auto& [device, flag] : found_inf_) {
    found = at::maximum(found, on_device(flag, found.device()));
  }
  return found;
}

void LossScaler::synchronize(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) throw InvalidArgument("LossScaler::synchronize() needs a process group, got null");
  if (!options_.dynamic() || group->getSize() == 1) return;
  at::NoGradGuard no_grad;
  const at::Tensor flag = found_inf();
  const std::string what = "all-reduce of the overflow flags of a LossScaler";
  parallel::run_collective(what, *group, [&] {
    return parallel::issue_all_reduce(what, *group, flag, c10d::ReduceOp::MAX);
  });
  // This flag is at least as large as the flag of every device, so those flags need no change.
  found_inf_on(flag.device()).copy_(flag);
}

bool LossScaler::overflowed() const { return found_inf().item<float>() > 0; }

void LossScaler::clear_found_inf() {
  at::NoGradGuard no_grad;
  for (auto& [device, flag] : found_inf_) flag.zero_();
}

void LossScaler::update() {
  stages_.clear();
  if (!options_.dynamic()) return;
  at::NoGradGuard no_grad;
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf(), options_.growth_factor(),
                         options_.backoff_factor(), options_.growth_interval());
  if (options_.min_scale() || options_.max_scale()) {
    std::optional<at::Scalar> low, high;
    if (options_.min_scale()) low = *options_.min_scale();
    if (options_.max_scale()) high = *options_.max_scale();
    // The tracker is zero only after a change of the scale. A scale that the caller has set is not
    // clamped before that.
    scale_.copy_(at::where(growth_tracker_ == 0, scale_.clamp(low, high), scale_));
  }
  clear_found_inf();
}

double LossScaler::get_scale() const { return scale_.item<float>(); }

void LossScaler::set_scale(double scale) {
  require(is_positive(scale), "the scale cannot be set to " + std::to_string(scale) +
                                  "; it must be positive and finite.");
  at::NoGradGuard no_grad;
  scale_.fill_(scale);
}

int64_t LossScaler::growth_tracker() const { return growth_tracker_.item<int32_t>(); }

void LossScaler::set_growth_tracker(int64_t count) {
  require(count >= 0 && count <= INT32_MAX, "the growth tracker cannot be set to " +
                                                std::to_string(count) +
                                                "; it must be between 0 and 2^31 - 1.");
  at::NoGradGuard no_grad;
  // The scale grows when the count becomes the interval, which may have been longer before.
  growth_tracker_.fill_(std::min(count, options_.growth_interval() - 1));
}

}  // namespace apex::amp
