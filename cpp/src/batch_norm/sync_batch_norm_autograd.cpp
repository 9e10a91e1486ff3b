// SPDX-License-Identifier: BSD-3-Clause
// Autograd of torch.ops.apex.*. Without grad mode, the backward of sync_batch_norm is one operator.
// With grad mode (create_graph), it is a formula of differentiable operators, so that derivatives
// of any order follow.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor or_undefined(const OptionalTensor& tensor) {
  return present(tensor) ? *tensor : at::Tensor();
}

[[noreturn]] void refuse_transforms() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "apex sync batch norm: transforms of torch.func and forward-mode derivatives are not "
      "supported in training with several ranks or on a GPU. Use backward() or "
      "torch.autograd.grad, which support derivatives of any order, or call the module in eval().");
}

/// Throws if this call is part of a transform of torch.func or of a forward-mode derivative, which
/// custom autograd nodes do not support.
void check_not_transformed(std::initializer_list<at::Tensor> tensors) {
  const auto has_tangent = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  };
  // This key is included while a transform runs. (functorch's headers have functions for this, but
  // include a header that torch does not ship.)
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      std::any_of(tensors.begin(), tensors.end(), has_tangent))
    refuse_transforms();
}

class AllReduceSumFunction : public Function<AllReduceSumFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, std::string group_name,
                            std::string layer) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["layer"] = layer;
    return all_reduce_sum(tensor, group_name, layer);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return {differentiable_sum(gradients[0], ctx->saved_data["group_name"].toStringRef(),
                               ctx->saved_data["layer"].toStringRef()),
            {},
            {}};
  }
};

class ForwardFunction : public Function<ForwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const ForwardArguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, invstd, count] = call(a);
    ctx->save_for_backward({input, or_undefined(weight), mean, invstd, count});
    ctx->saved_data["eps"] = a.eps;
    ctx->saved_data["has_bias"] = present(bias);
    ctx->saved_data["group_name"] = std::string(a.group_name);
    ctx->saved_data["layer"] = std::string(a.layer);
    ctx->mark_non_differentiable({mean, invstd, count});
    // Otherwise autograd creates zero gradients of the statistics: three launches for nothing.
    ctx->set_materialize_grads(false);
    return {output, mean, invstd, count};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    // Continue without a gradient, because other ranks may have one and wait for this rank's sums.
    const at::Tensor dy = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[0]);
    check_not_transformed({dy, saved[0]});
    const OptionalTensor weight = saved[1].defined() ? OptionalTensor(saved[1]) : std::nullopt;
    size_t edge = 0;  // autograd numbers edges without the absent tensors
    const auto needed = [&](bool there) { return there && ctx->needs_input_grad(edge++); };
    const bool input = needed(true), of_weight = needed(weight.has_value());
    const BackwardArguments a{dy,
                              saved[0],
                              weight,
                              saved[2],
                              saved[3],
                              saved[4],
                              {input, of_weight, needed(ctx->saved_data["has_bias"].toBool())},
                              ctx->saved_data["group_name"].toStringRef(),
                              ctx->saved_data["layer"].toStringRef()};
    BackwardResult result;
    if (at::GradMode::is_enabled()) {
      std::optional<double> eps;
      if (saved[0].requires_grad()) eps = ctx->saved_data["eps"].toDouble();
      result = backward_formula(a, eps);
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      result = call(a);
    }
    const auto& [dx, dweight, dbias] = result;
    return {a.needs[0] ? dx : Variable(),
            a.needs[1] ? dweight : Variable(),
            a.needs[2] ? dbias : Variable(),
            {}};
  }
};

/// Bumps the versions of the tensors that are overwritten here. A backward that has saved one then
/// detects the change.
void mark_changed(const ForwardArguments& a) {
  for (const OptionalTensor* tensor : {&a.running_mean, &a.running_var, &a.num_batches_tracked}) {
    if (present(*tensor) && !(*tensor)->is_inference())
      torch::autograd::impl::bump_version(**tensor);
  }
}

/// Inference mode skips autograd, but the overwritten tensors may have been saved outside of it.
ForwardResult forward_without_node(const ForwardArguments& a) {
  at::AutoDispatchBelowADInplaceOrView below;
  ForwardResult result = call(a);
  mark_changed(a);
  return result;
}

ForwardResult forward_autograd(const ForwardArguments& a) {
  check_not_transformed({a.input, or_undefined(a.weight), or_undefined(a.bias)});
  const auto needs_grad = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  // A node costs as much as all other work per call.
  if (!at::GradMode::is_enabled() || !(needs_grad(a.input) || needs_grad(or_undefined(a.weight)) ||
                                       needs_grad(or_undefined(a.bias)))) {
    return forward_without_node(a);
  }
  const variable_list results = ForwardFunction::apply(a.input, a.weight, a.bias, a);
  mark_changed(a);
  return {results[0], results[1], results[2], results[3]};
}

void refuse_batched(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) {
  refuse_transforms();
}

}  // namespace

at::Tensor differentiable_sum(const at::Tensor& tensor, c10::string_view group_name,
                              c10::string_view layer) {
  return AllReduceSumFunction::apply(tensor, std::string(group_name), std::string(layer));
}

}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, Autograd, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_autograd>);
}

TORCH_LIBRARY_IMPL(apex, ADInplaceOrView, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_without_node>);
}

TORCH_LIBRARY_IMPL(apex, FuncTorchBatched, m) {
  using namespace apex::parallel::detail;
  for (const char* name : {"sync_batch_norm", "sync_batch_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_batched>());
  }
}
