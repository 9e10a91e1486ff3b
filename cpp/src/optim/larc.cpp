// SPDX-License-Identifier: BSD-3-Clause
#include <apex/optim.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>
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

void check_gradient(const at::Tensor& grad, size_t group, size_t index) {
  if (grad.layout() == at::kStrided && at::isFloatingType(grad.scalar_type())) return;
  throw InvalidArgument("LARC needs dense real gradients; parameter " + std::to_string(index) +
                        " of group " + std::to_string(group) + " has a " +
                        c10::toString(grad.scalar_type()) + " one" +
                        (grad.layout() == at::kStrided ? "" : " that is sparse") +
                        ". Give such parameters to another optimizer.");
}

/// Adds weight decay to the gradients and multiplies them by their factors, for parameters of the
/// same device and dtypes. The factors stay on the device, so the host never waits for them.
void adapt_alike(const Tensors& params, const Tensors& grads, double lr, double decay,
                 const LARCOptions& options) {
  const at::ScalarType dtype = c10::promoteTypes(params[0].scalar_type(), at::kFloat);
  const at::Tensor param_norms = at::stack(at::_foreach_norm(params, 2, dtype));
  const at::Tensor grad_norms = at::stack(at::_foreach_norm(grads, 2, dtype));
  at::Tensor factors = param_norms * options.trust_coefficient();
  factors = factors / (grad_norms + param_norms * decay + options.eps());
  if (options.clip()) factors = (factors / lr).clamp_max(1);
  const at::Tensor usable = (param_norms != 0).logical_and(grad_norms != 0);
  factors = at::where(usable, factors, 1);
  // Factors of float16 parameters may be smaller than float16's smallest number.
  const auto widened = [dtype](Tensors tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(dtype);
    return tensors;
  };
  const Tensors wide = widened(grads);
  at::_foreach_mul_(wide, factors.unbind());
  if (decay != 0)
    at::_foreach_addcmul_(wide, widened(params), at::where(usable, factors * decay, 0).unbind());
  if (!wide[0].is_same(grads[0])) at::_foreach_copy_(grads, wide);
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
  if (decays.size() != groups.size())
    throw InvalidArgument("LARC: a closure has added a parameter group; add it between steps.");
  // By group, device, and dtypes of parameter and gradient.
  using Kind =
      std::tuple<size_t, c10::DeviceType, c10::DeviceIndex, at::ScalarType, at::ScalarType>;
  std::map<Kind, std::pair<Tensors, Tensors>> kinds;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups[i].params().size(); ++j) {
      const at::Tensor &param = groups[i].params()[j], &grad = param.grad();
      if (!grad.defined()) continue;
      check_gradient(grad, i, j);
      auto& [params, grads] = kinds[{i, param.device().type(), param.device().index(),
                                     param.scalar_type(), grad.scalar_type()}];
      params.push_back(param);
      grads.push_back(grad);
    }
  }
  for (const auto& [kind, alike] : kinds) {
    const size_t i = std::get<0>(kind);
    adapt_alike(alike.first, alike.second, groups[i].options().get_lr(), decays[i].second,
                options_);
  }
}

}  // namespace apex::parallel
