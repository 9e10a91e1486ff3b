// SPDX-License-Identifier: BSD-3-Clause
#include <apex/optim.h>

#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/optim.h>

#include <apex/error.h>

namespace apex::parallel {
namespace {

using torch::optim::Optimizer;
using Tensors = std::vector<at::Tensor>;

/// The place of the weight decay in the options of a group; null if they have none.
double* weight_decay_of(torch::optim::OptimizerParamGroup& group) {
  using namespace torch::optim;
  OptimizerOptions* const options = &group.options();
  if (auto* const sgd = dynamic_cast<SGDOptions*>(options)) return &sgd->weight_decay();
  if (auto* const adam = dynamic_cast<AdamOptions*>(options)) return &adam->weight_decay();
  if (auto* const adamw = dynamic_cast<AdamWOptions*>(options)) return &adamw->weight_decay();
  if (auto* const adagrad = dynamic_cast<AdagradOptions*>(options)) return &adagrad->weight_decay();
  if (auto* const rmsprop = dynamic_cast<RMSpropOptions*>(options)) return &rmsprop->weight_decay();
  return nullptr;
}

/// Adds weight decay to the gradients and multiplies them by their factors. The factors stay on the
/// device, so the host never waits for them.
void adapt_group(const Tensors& params, const Tensors& grads, double lr, double decay,
                 const LARCOptions& options) {
  at::ScalarType dtype = at::kFloat;
  for (const at::Tensor& param : params) dtype = c10::promoteTypes(dtype, param.scalar_type());
  const at::Tensor param_norms = at::stack(at::_foreach_norm(params, 2, dtype));
  const at::Tensor grad_norms = at::stack(at::_foreach_norm(grads, 2, dtype));
  at::Tensor factors = param_norms * options.trust_coefficient();
  factors = factors / (grad_norms + param_norms * decay + options.eps());
  if (options.clip()) factors = (factors / lr).clamp_max(1);
  factors = at::where(param_norms != 0, factors, 1);
  factors = at::where(grad_norms != 0, factors, 0);  // such a parameter gets no decay either
  // Factors of float16 parameters may be smaller than float16's smallest number.
  const auto widened = [dtype](Tensors tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(dtype);
    return tensors;
  };
  const Tensors wide = widened(grads);
  at::_foreach_mul_(wide, factors.unbind());  // in the order of LARC in Python, for the same bits
  if (decay != 0) at::_foreach_addcmul_(wide, widened(params), (factors * decay).unbind());
  for (size_t i = 0; i < grads.size(); ++i) grads[i].copy_(wide[i]);  // nothing for itself
}

}  // namespace

LARC::LARC(Optimizer& optimizer, const LARCOptions& options)
    : optimizer_(optimizer), options_(options) {
  const double trust = options.trust_coefficient(), eps = options.eps();
  if (trust > 0 && std::isfinite(trust) && eps >= 0 && std::isfinite(eps)) return;
  throw InvalidArgument("LARC: trust_coefficient is " + std::to_string(trust) + " and eps is " +
                        std::to_string(eps) +
                        "; both must be finite, the former positive and the latter not negative.");
}

at::Tensor LARC::step(const Optimizer::LossClosure& closure) {
  std::vector<std::pair<double*, double>> decays;
  for (auto& group : optimizer_.param_groups()) {
    double* const place = weight_decay_of(group);
    decays.emplace_back(place, place ? std::exchange(*place, 0) : 0);
  }
  const auto restore = c10::make_scope_exit([&decays] {
    for (const auto& [place, value] : decays) {
      if (place) *place = value;
    }
  });
  if (!closure) adapt(decays);
  return !closure ? optimizer_.step() : optimizer_.step([&] {
    at::Tensor evaluated = closure();
    adapt(decays);
    return evaluated;
  });
}

void LARC::adapt(const std::vector<std::pair<double*, double>>& decays) {
  const at::NoGradGuard no_grad;
  const auto& groups = optimizer_.param_groups();
  std::vector<Tensors> params(decays.size()), grads(decays.size());
  for (size_t i = 0; i < decays.size(); ++i) {
    for (size_t j = 0; j < groups[i].params().size(); ++j) {
      const at::Tensor &param = groups[i].params()[j], &grad = param.grad();
      if (!grad.defined()) continue;
      if (grad.layout() != at::kStrided || !at::isFloatingType(grad.scalar_type())) {
        throw InvalidArgument("LARC needs dense real gradients; parameter " + std::to_string(j) +
                              " of group " + std::to_string(i) + " has a " + grad.toString() +
                              ". Give such parameters to another optimizer.");
      }
      params[i].push_back(param);
      grads[i].push_back(grad);
    }
  }
  for (size_t i = 0; i < decays.size(); ++i) {
    if (params[i].empty()) continue;
    adapt_group(params[i], grads[i], groups[i].options().get_lr(), decays[i].second, options_);
  }
}

}  // namespace apex::parallel
