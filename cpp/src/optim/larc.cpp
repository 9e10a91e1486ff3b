// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/larc.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <apex/error.h>

#include "optim/step_notice.h"

namespace apex::parallel {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<at::Tensor>;

template <typename Options>
double* weight_decay_in(OptimizerOptions& options) {
  auto* known = dynamic_cast<Options*>(&options);
  return known ? &known->weight_decay() : nullptr;
}

/// A pointer to the weight decay in the options of a group; null if they have none.
double* weight_decay_of(OptimizerParamGroup& group) {
  if (!group.has_options()) return nullptr;
  OptimizerOptions& options = group.options();
  for (const auto find :
       {&weight_decay_in<torch::optim::SGDOptions>, &weight_decay_in<torch::optim::AdamOptions>,
        &weight_decay_in<torch::optim::AdamWOptions>,
        &weight_decay_in<torch::optim::AdagradOptions>,
        &weight_decay_in<torch::optim::RMSpropOptions>}) {
    if (double* decay = find(options)) return decay;
  }
  return nullptr;
}

/// RAII guard that sets the weight decay of every group to zero and keeps the values.
class WeightDecays {
 public:
  explicit WeightDecays(std::vector<OptimizerParamGroup>& groups) {
    for (OptimizerParamGroup& group : groups) {
      double* place = weight_decay_of(group);
      places_.push_back(place);
      values_.push_back(place ? *place : 0);
      if (place) *place = 0;
    }
  }
  ~WeightDecays() {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i]) *places_[i] = values_[i];
    }
  }
  WeightDecays(const WeightDecays&) = delete;
  WeightDecays& operator=(const WeightDecays&) = delete;

  const std::vector<double>& values() const { return values_; }

 private:
  std::vector<double*> places_;  // point into options, which stay in place when groups move
  std::vector<double> values_;
};

/// Parameters of one group with the same device and dtypes, and their gradients.
struct Alike {
  Tensors params;
  Tensors grads;
};

using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType, at::ScalarType>;

void check_gradient(const at::Tensor& grad, size_t group, size_t index) {
  if (grad.layout() == at::kStrided && at::isFloatingType(grad.scalar_type())) return;
  throw InvalidArgument("LARC needs dense real gradients; parameter " + std::to_string(index) +
                        " of group " + std::to_string(group) + " has a " +
                        c10::toString(grad.scalar_type()) + " one" +
                        (grad.layout() == at::kStrided ? "" : " that is sparse") +
                        ". Give such parameters to another optimizer.");
}

std::map<Kind, Alike> sort_by_kind(const OptimizerParamGroup& group) {
  std::map<Kind, Alike> kinds;
  for (const at::Tensor& param : group.params()) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    Alike& alike = kinds[{param.device().type(), param.device().index(), param.scalar_type(),
                          grad.scalar_type()}];
    alike.params.push_back(param);
    alike.grads.push_back(grad);
  }
  return kinds;
}

/// Adds weight decay to the gradients and multiplies them by their factors. The factors stay on the
/// device, so the host never waits for them.
void adapt_alike(const Alike& alike, double lr, double decay, const LARCOptions& options) {
  const at::ScalarType dtype =
      c10::promoteTypes(alike.params[0].scalar_type(), at::ScalarType::Float);
  const at::Tensor param_norms = at::stack(at::_foreach_norm(alike.params, 2, dtype));
  const at::Tensor grad_norms = at::stack(at::_foreach_norm(alike.grads, 2, dtype));
  at::Tensor factors = param_norms * options.trust_coefficient();
  factors = factors / (grad_norms + param_norms * decay + options.eps());
  if (options.clip()) factors = (factors / lr).clamp_max(1);
  const at::Tensor usable = (param_norms != 0).logical_and(grad_norms != 0);
  factors = at::where(usable, factors, 1);
  // Factors of float16 parameters may be smaller than float16's smallest number.
  const auto widened = [dtype](std::vector<at::Tensor> tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(dtype);
    return tensors;
  };
  const std::vector<at::Tensor> wide = widened(alike.grads);
  at::_foreach_mul_(wide, factors.unbind());
  if (decay != 0) {
    const at::Tensor shares = at::where(usable, factors * decay, 0);
    at::_foreach_addcmul_(wide, widened(alike.params), shares.unbind());
  }
  if (!wide[0].is_same(alike.grads[0])) at::_foreach_copy_(alike.grads, wide);
}

std::unique_ptr<OptimizerOptions> defaults_of(const std::unique_ptr<Optimizer>& optimizer) {
  if (!optimizer) throw InvalidArgument("LARC: the optimizer is null; pass the one to wrap.");
  return optimizer->defaults().clone();
}

}  // namespace

/// RAII guard that moves the groups and the state of a LARC to the wrapped optimizer, which
/// otherwise has none, and back. Options and states are held by pointer, and a swap does not move
/// the elements of a vector. So references that the wrapped optimizer holds while a closure runs
/// stay valid.
class LARC::Lent {
 public:
  explicit Lent(LARC& owner) : owner_(owner) { swap(); }
  ~Lent() { swap(); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  /// RAII guard that moves both back to the LARC, while a closure runs.
  class Returned {
   public:
    explicit Returned(Lent& lent) : lent_(lent) { lent_.swap(); }
    ~Returned() { lent_.swap(); }
    Returned(const Returned&) = delete;
    Returned& operator=(const Returned&) = delete;

   private:
    Lent& lent_;
  };

 private:
  void swap() noexcept {
    std::swap(owner_.param_groups_, owner_.wrapped_->param_groups());
    std::swap(owner_.state_, owner_.wrapped_->state());
  }

  LARC& owner_;
};

LARC::LARC(std::unique_ptr<Optimizer> optimizer, const LARCOptions& options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, defaults_of(optimizer)),
      wrapped_(std::move(optimizer)),
      options_(options) {
  if (!(options.trust_coefficient() > 0) || !std::isfinite(options.trust_coefficient())) {
    throw InvalidArgument("LARC: trust_coefficient is " +
                          std::to_string(options.trust_coefficient()) +
                          "; it must be positive and finite.");
  }
  if (!(options.eps() >= 0) || !std::isfinite(options.eps())) {
    throw InvalidArgument("LARC: eps is " + std::to_string(options.eps()) +
                          "; it must be finite and not negative.");
  }
  std::swap(param_groups_, wrapped_->param_groups());
  std::swap(state_, wrapped_->state());
}

LARC::~LARC() = default;
LARC::LARC(LARC&& other)
    : Optimizer(std::move(other)), wrapped_(std::move(other.wrapped_)), options_(other.options_) {
  other.defaults_ = defaults_->clone();
}

LARC& LARC::operator=(LARC&& other) {
  if (this == &other) return *this;
  Optimizer::operator=(std::move(other));
  wrapped_ = std::move(other.wrapped_);
  options_ = other.options_;
  other.defaults_ = defaults_->clone();
  return *this;
}

void LARC::require_wrapped() const {
  if (!wrapped_) {
    throw Error("LARC: this object was moved from: use the one that it was moved to");
  }
}

torch::Tensor LARC::step(LossClosure closure) {
  require_wrapped();
  torch::Tensor loss = step_wrapped(closure);
  detail::report_step(*this, detail::Reporter::kItself);
  return loss;
}

torch::Tensor LARC::step_wrapped(const LossClosure& closure) {
  WeightDecays decays(param_groups_);
  if (!closure) {
    adapt(decays.values());
    Lent lent(*this);
    return wrapped_->step();
  }
  Lent lent(*this);
  return wrapped_->step([&] {
    const Lent::Returned returned(lent);
    torch::Tensor loss = closure();
    adapt(decays.values());
    return loss;
  });
}

void LARC::adapt(const std::vector<double>& decays) {
  at::NoGradGuard no_grad;
  if (decays.size() != param_groups_.size())
    throw InvalidArgument("LARC: a closure has added a parameter group; add it between steps.");
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const Tensors& params = param_groups_[i].params();
    for (size_t j = 0; j < params.size(); ++j) {
      if (params[j].grad().defined()) check_gradient(params[j].grad(), i, j);
    }
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const double lr = param_groups_[i].options().get_lr();
    for (const auto& [kind, alike] : sort_by_kind(param_groups_[i])) {
      adapt_alike(alike, lr, decays[i], options_);
    }
  }
}

void LARC::save(torch::serialize::OutputArchive& archive) const {
  require_wrapped();
  // This object is const, so the wrapped optimizer gets copies, which share the tensors.
  auto& groups = wrapped_->param_groups();
  auto& state = wrapped_->state();
  const auto clear = [&] {
    groups.clear();
    state.clear();
  };
  try {
    for (const OptimizerParamGroup& group : param_groups_) groups.emplace_back(group);
    for (const auto& [param, own] : state_) state[param] = own->clone();
    wrapped_->save(archive);
  } catch (...) {
    clear();
    throw;
  }
  clear();
}

void LARC::load(torch::serialize::InputArchive& archive) {
  require_wrapped();
  const Lent lent(*this);
  wrapped_->load(archive);
}

}  // namespace apex::parallel
