// SPDX-License-Identifier: BSD-3-Clause
// Autograd of torch.ops.apex.*. Each operator is a node whose backward calls operators again, so
// that derivatives of any order, tracing and fake tensors work without special cases.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

const at::Tensor& or_undefined(const at::Tensor& tensor) { return tensor; }

at::Tensor or_undefined(const OptionalTensor& tensor) {
  return present(tensor) ? *tensor : at::Tensor();
}

OptionalTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

/// Replaces the empty tensor that the operator returns for a gradient that was not requested.
Variable if_needed(bool needed, const at::Tensor& gradient) {
  return needed ? gradient : Variable();
}

/// Counts a node's edges. Autograd numbers them without the absent tensors.
class EdgeCounter {
 public:
  explicit EdgeCounter(AutogradContext* ctx) : ctx_(ctx) {}
  bool needs(bool there) { return there && ctx_->needs_input_grad(next_++); }

 private:
  AutogradContext* ctx_;
  size_t next_ = 0;
};

OutputMask needed_gradients(AutogradContext* ctx, bool z, bool weight, bool bias) {
  EdgeCounter edges(ctx);
  const bool needs_input = edges.needs(true);
  const bool needs_z = edges.needs(z);
  const bool needs_weight = edges.needs(weight);
  return {needs_input, needs_z, needs_weight, edges.needs(bias)};
}

/// Tensors that have edges are separate arguments, as autograd requires. The others are in `a`.
class BackwardFunction : public Function<BackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& grad_output,
                               const at::Tensor& input, const OptionalTensor& weight,
                               const BackwardArguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dz, dweight, dbias] = call(a);
    ctx->save_for_backward({grad_output, input, or_undefined(a.output), or_undefined(weight),
                            or_undefined(a.bias), a.mean, a.invstd_or_var, or_undefined(a.count)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = a.eps;
    ctx->saved_data["channel_last"] = a.channel_last;
    ctx->saved_data["fuse_relu"] = a.fuse_relu;
    ctx->saved_data["group_name"] = std::string(a.group_name);
    ctx->saved_data["layer"] = std::string(a.layer);
    ctx->saved_data["needs_input"] = a.needs[0];
    ctx->saved_data["needs_z"] = a.needs[1] && a.fuse_relu;
    ctx->saved_data["needs_weight"] = a.needs[2];
    ctx->saved_data["needs_bias"] = a.needs[3];
    return {dx, dz, dweight, dbias};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor output = or_none(saved[2]), weight = or_none(saved[3]),
                         bias = or_none(saved[4]), count = or_none(saved[7]);
    // Derivatives by x may be needed although the first backward did not compute dx, because
    // dweight also depends on x through the statistics.
    const bool through_input = ctx->saved_data["needs_input"].toBool() || saved[1].requires_grad();
    // A result that was not requested is an empty placeholder, and so is its gradient.
    const auto gradient = [&](int64_t i, const char* needed) {
      return ctx->saved_data[needed].toBool() ? gradients[i] : Variable();
    };
    const OutputMask needs{through_input};
    const DoubleBackwardResult result = double_backward(
        {saved[0], saved[1], output, weight, bias, saved[5], saved[6], count,
         ctx->saved_data["eps"].toDouble(), ctx->saved_data["channel_last"].toBool(),
         ctx->saved_data["fuse_relu"].toBool(), needs, ctx->saved_data["group_name"].toStringRef(),
         ctx->saved_data["layer"].toStringRef()},
        gradient(0, "needs_input"), gradient(1, "needs_z"), gradient(2, "needs_weight"),
        gradient(3, "needs_bias"));
    return {result.grad_output, result.input, result.weight, {}};
  }
};

/// Saves what the backward needs, for training and inference.
template <typename Arguments>
void save_for_backward(AutogradContext* ctx, const Arguments& a, const at::Tensor& output,
                       const at::Tensor& mean, const at::Tensor& invstd_or_var,
                       const at::Tensor& count, c10::string_view group_name = {},
                       c10::string_view layer = {}) {
  const at::Tensor of_relu = a.fuse_relu && present(a.z) ? output : at::Tensor();
  ctx->save_for_backward(
      {a.input, of_relu, or_undefined(a.weight), or_undefined(a.bias), mean, invstd_or_var, count});
  ctx->saved_data["eps"] = a.eps;
  ctx->saved_data["has_z"] = present(a.z);
  ctx->saved_data["channel_last"] = a.channel_last;
  ctx->saved_data["fuse_relu"] = a.fuse_relu;
  ctx->saved_data["group_name"] = std::string(group_name);
  ctx->saved_data["layer"] = std::string(layer);
}

variable_list backward_of_saved(AutogradContext* ctx, const at::Tensor& dy) {
  const variable_list saved = ctx->get_saved_variables();
  const OptionalTensor output = or_none(saved[1]), weight = or_none(saved[2]),
                       bias = or_none(saved[3]), count = or_none(saved[6]);
  const bool fuse_relu = ctx->saved_data["fuse_relu"].toBool();
  const OutputMask needs =
      needed_gradients(ctx, ctx->saved_data["has_z"].toBool(), present(weight), present(bias));
  const auto [dx, dz, dweight, dbias] = call(
      {dy, saved[0], output, weight, bias, saved[4], saved[5], count,
       ctx->saved_data["eps"].toDouble(), ctx->saved_data["channel_last"].toBool(), fuse_relu,
       needs, ctx->saved_data["group_name"].toStringRef(), ctx->saved_data["layer"].toStringRef()});
  return {if_needed(needs[0], dx),
          if_needed(needs[1], fuse_relu ? dz : dy),
          if_needed(needs[2], dweight),
          if_needed(needs[3], dbias),
          {}};
}

class ForwardFunction : public Function<ForwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&,
                               const ForwardArguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, invstd, count] = call(a);
    save_for_backward(ctx, a, output, mean, invstd, count, a.group_name, a.layer);
    ctx->mark_non_differentiable({mean, invstd, count});
    // Otherwise autograd creates zero gradients of the statistics: three launches for nothing.
    ctx->set_materialize_grads(false);
    return {output, mean, invstd, count};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    // Continue without a gradient, because other ranks may have one and wait for this rank's sums.
    const at::Tensor dy =
        gradients[0].defined() ? gradients[0] : at::zeros_like(ctx->get_saved_variables().front());
    return backward_of_saved(ctx, dy);
  }
};

class InferenceFunction : public Function<InferenceFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&,
                            const InferenceArguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor output = call(a);
    save_for_backward(ctx, a, output, a.running_mean, a.running_var, {});
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return backward_of_saved(ctx, gradients[0]);
  }
};

class AllReduceSumFunction : public Function<AllReduceSumFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, std::string group_name,
                            std::string layer) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["layer"] = layer;
    return call_all_reduce_sum(tensor, group_name, layer);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor sum =
        call_all_reduce_sum(gradients[0], ctx->saved_data["group_name"].toStringRef(),
                            ctx->saved_data["layer"].toStringRef());
    return {sum, {}, {}};
  }
};

/// Whether this call is part of a transform of torch.func or of a forward-mode derivative. Custom
/// autograd nodes do not support these.
template <typename... Tensors>
bool is_transformed(const Tensors&... tensors) {
  // This key is included while a transform runs. (functorch's headers have functions for this, but
  // include a header that torch does not ship.)
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) {
    return true;
  }
  const auto has_tangent = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  };
  return (has_tangent(or_undefined(tensors)) || ...);
}

/// Whether a call with these arguments needs an autograd node. A node costs as much as all other
/// per-call work, so calls without one skip autograd.
template <typename... Tensors>
bool needs_node(const Tensors&... tensors) {
  const auto concerns = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  return at::GradMode::is_enabled() && (concerns(or_undefined(tensors)) || ...);
}

/// Bumps the version of a tensor that is overwritten here. A backward that has saved it then
/// detects the change.
void mark_changed(const OptionalTensor& tensor) {
  if (present(tensor) && !tensor->is_inference()) {
    torch::autograd::impl::bump_version(*tensor);
  }
}

void mark_changed(const ForwardArguments& a) {
  mark_changed(a.running_mean);
  mark_changed(a.running_var);
  mark_changed(a.num_batches_tracked);
}

/// Inference mode skips autograd, but the overwritten tensors may have been saved outside of it.
ForwardResult forward_without_node(const ForwardArguments& a) {
  ForwardResult result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = call(a);
  }
  mark_changed(a);
  return result;
}

ForwardResult forward_autograd(const ForwardArguments& a) {
  if (is_transformed(a.input, a.z, a.weight, a.bias)) return forward_transformed(a);
  if (!needs_node(a.input, a.z, a.weight, a.bias)) return forward_without_node(a);
  const variable_list results = ForwardFunction::apply(a.input, a.z, a.weight, a.bias, a);
  mark_changed(a);
  return {results[0], results[1], results[2], results[3]};
}

BackwardResult backward_autograd(const BackwardArguments& a) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_transformed(a.grad_output, a.input, a.output, a.weight, a.bias),
                              "apex sync batch norm: this derivative is inside a transform of "
                              "torch.func or a forward-mode derivative, but the forward was "
                              "outside; call the module inside the transform (or dual_level).");
  if (!needs_node(a.grad_output, a.input, a.output, a.weight, a.bias)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call(a);
  }
  const variable_list results = BackwardFunction::apply(a.grad_output, a.input, a.weight, a);
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor inference_autograd(const InferenceArguments& a) {
  if (is_transformed(a.input, a.z, a.weight, a.bias)) return inference_transformed(a);
  if (needs_node(a.input, a.z, a.weight, a.bias)) {
    return InferenceFunction::apply(a.input, a.z, a.weight, a.bias, a);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call(a);
}

at::Tensor all_reduce_sum_autograd(const at::Tensor& tensor, c10::string_view group_name,
                                   c10::string_view layer) {
  return AllReduceSumFunction::apply(tensor, std::string(group_name), std::string(layer));
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, Autograd, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_autograd>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_autograd>);
  m.impl("batch_norm_inference", &inference_kernel<&inference_autograd>);
  m.impl("all_reduce_sum", &all_reduce_sum_autograd);
}

TORCH_LIBRARY_IMPL(apex, ADInplaceOrView, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_without_node>);
}
