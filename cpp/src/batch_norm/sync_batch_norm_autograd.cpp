// Autograd of torch.ops.apex.*: each operator is a node whose backward calls an operator again, so
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

bool present(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

const at::Tensor& or_undefined(const at::Tensor& tensor) { return tensor; }

at::Tensor or_undefined(const OptionalTensor& tensor) {
  return present(tensor) ? *tensor : at::Tensor();
}

OptionalTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

/// A gradient nobody asked for arrives from the operator as an empty tensor.
Variable if_needed(bool needed, const at::Tensor& gradient) {
  return needed ? gradient : Variable();
}

/// Autograd numbers a node's edges by the tensors that were there, skipping absent ones.
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

class BackwardFunction : public Function<BackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& grad_output,
                               const at::Tensor& input, const OptionalTensor& output,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const at::Tensor& mean, const at::Tensor& invstd_or_var,
                               const OptionalTensor& count, double eps, bool channel_last,
                               bool fuse_relu, OutputMask needs, std::string group_name) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dz, dweight, dbias] =
        call_backward(grad_output, input, output, weight, bias, mean, invstd_or_var, count, eps,
                      channel_last, fuse_relu, needs, group_name);
    ctx->save_for_backward({grad_output, input, or_undefined(output), or_undefined(weight),
                            or_undefined(bias), mean, invstd_or_var, or_undefined(count)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["channel_last"] = channel_last;
    ctx->saved_data["fuse_relu"] = fuse_relu;
    ctx->saved_data["needs_input"] = needs[0];
    ctx->saved_data["needs_z"] = needs[1] && fuse_relu;
    ctx->saved_data["needs_weight"] = needs[2];
    ctx->saved_data["needs_bias"] = needs[3];
    ctx->saved_data["group_name"] = group_name;
    return {dx, dz, dweight, dbias};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    // What the first derivative was asked for is one thing, what depends on x another: dweight
    // does, through the statistics, too.
    const bool through_input = ctx->saved_data["needs_input"].toBool() || saved[1].requires_grad();
    const BackwardCall call{saved[0],
                            saved[1],
                            or_none(saved[2]),
                            or_none(saved[3]),
                            or_none(saved[4]),
                            saved[5],
                            saved[6],
                            or_none(saved[7]),
                            ctx->saved_data["eps"].toDouble(),
                            ctx->saved_data["channel_last"].toBool(),
                            ctx->saved_data["fuse_relu"].toBool(),
                            through_input,
                            ctx->saved_data["group_name"].toStringRef()};
    // A result that was not asked for is an empty placeholder, and so is its gradient.
    const auto gradient = [&](int64_t i, const char* needed) {
      return ctx->saved_data[needed].toBool() ? gradients[i] : Variable();
    };
    const DoubleBackwardResult result =
        double_backward(call, gradient(0, "needs_input"), gradient(1, "needs_z"),
                        gradient(2, "needs_weight"), gradient(3, "needs_bias"));
    return {
        result.grad_output, result.input, {}, result.weight, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

class ForwardFunction : public Function<ForwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const OptionalTensor& z, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& running_mean,
                               const OptionalTensor& running_var,
                               const OptionalTensor& num_batches_tracked,
                               std::optional<double> momentum, double eps, bool channel_last,
                               bool fuse_relu, std::string group_name) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, invstd, count] =
        call_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                     momentum, eps, channel_last, fuse_relu, group_name);
    ctx->save_for_backward({input, fuse_relu && present(z) ? output : at::Tensor(),
                            or_undefined(weight), or_undefined(bias), mean, invstd, count});
    ctx->mark_non_differentiable({mean, invstd, count});
    // Else autograd would make zeros as gradients of the statistics: three launches for nothing.
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["has_z"] = present(z);
    ctx->saved_data["channel_last"] = channel_last;
    ctx->saved_data["fuse_relu"] = fuse_relu;
    ctx->saved_data["group_name"] = group_name;
    return {output, mean, invstd, count};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const bool has_z = ctx->saved_data["has_z"].toBool();
    const bool fuse_relu = ctx->saved_data["fuse_relu"].toBool();
    const OutputMask needs = needed_gradients(ctx, has_z, saved[2].defined(), saved[3].defined());
    // Without a gradient, too: other ranks may have one, and wait for this one's sums.
    const at::Tensor dy = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[0]);
    const auto [dx, dz, dweight, dbias] =
        call_backward(dy, saved[0], or_none(saved[1]), or_none(saved[2]), or_none(saved[3]),
                      saved[4], saved[5], or_none(saved[6]), ctx->saved_data["eps"].toDouble(),
                      ctx->saved_data["channel_last"].toBool(), fuse_relu, needs,
                      ctx->saved_data["group_name"].toStringRef());
    return {if_needed(needs[0], dx),
            if_needed(needs[1], fuse_relu ? dz : dy),
            if_needed(needs[2], dweight),
            if_needed(needs[3], dbias),
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {}};
  }
};

class InferenceFunction : public Function<InferenceFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const OptionalTensor& z,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            double eps, bool channel_last, bool fuse_relu) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor output = call_inference(input, z, weight, bias, running_mean, running_var, eps,
                                       channel_last, fuse_relu);
    ctx->save_for_backward({input, fuse_relu && present(z) ? output : at::Tensor(),
                            or_undefined(weight), or_undefined(bias), running_mean, running_var});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["has_z"] = present(z);
    ctx->saved_data["channel_last"] = channel_last;
    ctx->saved_data["fuse_relu"] = fuse_relu;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const bool has_z = ctx->saved_data["has_z"].toBool();
    const bool fuse_relu = ctx->saved_data["fuse_relu"].toBool();
    const double eps = ctx->saved_data["eps"].toDouble();
    const OutputMask needs = needed_gradients(ctx, has_z, saved[2].defined(), saved[3].defined());
    const auto [dx, dz, dweight, dbias] =
        call_backward(gradients[0], saved[0], or_none(saved[1]), or_none(saved[2]),
                      or_none(saved[3]), saved[4], saved[5], std::nullopt, eps,
                      ctx->saved_data["channel_last"].toBool(), fuse_relu, needs, "");
    return {if_needed(needs[0], dx),
            if_needed(needs[1], fuse_relu ? dz : gradients[0]),
            if_needed(needs[2], dweight),
            if_needed(needs[3], dbias),
            {},
            {},
            {},
            {},
            {}};
  }
};

class AllReduceSumFunction : public Function<AllReduceSumFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            std::string group_name) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["group_name"] = group_name;
    return call_all_reduce_sum(tensor, group_name);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return {call_all_reduce_sum(gradients[0], ctx->saved_data["group_name"].toStringRef()), {}};
  }
};

/// Whether this call is part of a transform of torch.func or of a forward-mode derivative. A node
/// has no rules for them and refuses.
template <typename... Tensors>
bool is_transformed(const Tensors&... tensors) {
  // Included as long as a transform runs. (The headers that can be asked need one that torch does
  // not ship.)
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) {
    return true;
  }
  const auto has_tangent = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  };
  return (has_tangent(or_undefined(tensors)) || ...);
}

/// Whether autograd has to know of a call with these arguments. Making a node costs as much as
/// everything else that is done once per call; without one the call goes on below autograd.
template <typename... Tensors>
bool needs_node(const Tensors&... tensors) {
  const auto concerns = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  return at::GradMode::is_enabled() && (concerns(or_undefined(tensors)) || ...);
}

/// A tensor that was saved for some backward and is overwritten here has to be noticed there.
void mark_changed(const OptionalTensor& tensor) {
  if (present(tensor) && !tensor->is_inference()) {
    torch::autograd::impl::bump_version(*tensor);
  }
}

ForwardResult forward_autograd(const at::Tensor& input, const OptionalTensor& z,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& running_mean,
                               const OptionalTensor& running_var,
                               const OptionalTensor& num_batches_tracked,
                               std::optional<double> momentum, double eps, bool channel_last,
                               bool fuse_relu, c10::string_view group_name) {
  if (is_transformed(input, z, weight, bias)) {
    return forward_transformed(input, z, weight, bias, running_mean, running_var,
                               num_batches_tracked, momentum, eps, channel_last, fuse_relu,
                               group_name);
  }
  ForwardResult result;
  if (needs_node(input, z, weight, bias)) {
    variable_list results = ForwardFunction::apply(
        input, z, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
        channel_last, fuse_relu, std::string(group_name));
    result = {results[0], results[1], results[2], results[3]};
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    result = call_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                          momentum, eps, channel_last, fuse_relu, group_name);
  }
  mark_changed(running_mean);
  mark_changed(running_var);
  mark_changed(num_batches_tracked);
  return result;
}

BackwardResult backward_autograd(const at::Tensor& grad_output, const at::Tensor& input,
                                 const OptionalTensor& output, const OptionalTensor& weight,
                                 const OptionalTensor& bias, const at::Tensor& mean,
                                 const at::Tensor& invstd_or_var, const OptionalTensor& count,
                                 double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                                 c10::string_view group_name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_transformed(grad_output, input, output, weight, bias),
                              "apex sync batch norm: this derivative is part of a transform of "
                              "torch.func or of a forward-mode derivative, and the batch norm "
                              "itself is not; call the module inside of the transform (or of "
                              "dual_level), too.");
  if (!needs_node(grad_output, input, output, weight, bias)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(grad_output, input, output, weight, bias, mean, invstd_or_var, count, eps,
                         channel_last, fuse_relu, needs, group_name);
  }
  variable_list results =
      BackwardFunction::apply(grad_output, input, output, weight, bias, mean, invstd_or_var, count,
                              eps, channel_last, fuse_relu, needs, std::string(group_name));
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor inference_autograd(const at::Tensor& input, const OptionalTensor& z,
                              const OptionalTensor& weight, const OptionalTensor& bias,
                              const at::Tensor& running_mean, const at::Tensor& running_var,
                              double eps, bool channel_last, bool fuse_relu) {
  if (is_transformed(input, z, weight, bias)) {
    return inference_transformed(input, z, weight, bias, running_mean, running_var, eps,
                                 channel_last, fuse_relu);
  }
  if (!needs_node(input, z, weight, bias)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_inference(input, z, weight, bias, running_mean, running_var, eps, channel_last,
                          fuse_relu);
  }
  return InferenceFunction::apply(input, z, weight, bias, running_mean, running_var, eps,
                                  channel_last, fuse_relu);
}

/// Inference mode passes autograd by, but what is overwritten may have been saved outside of it.
ForwardResult forward_in_inference_mode(const at::Tensor& input, const OptionalTensor& z,
                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                        const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var,
                                        const OptionalTensor& num_batches_tracked,
                                        std::optional<double> momentum, double eps,
                                        bool channel_last, bool fuse_relu,
                                        c10::string_view group_name) {
  ForwardResult result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                        momentum, eps, channel_last, fuse_relu, group_name);
  }();
  mark_changed(running_mean);
  mark_changed(running_var);
  mark_changed(num_batches_tracked);
  return result;
}

at::Tensor all_reduce_sum_autograd(const at::Tensor& tensor, c10::string_view group_name) {
  return AllReduceSumFunction::apply(tensor, std::string(group_name));
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, Autograd, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_autograd);
  m.impl("sync_batch_norm_backward", &backward_autograd);
  m.impl("batch_norm_inference", &inference_autograd);
  m.impl("all_reduce_sum", &all_reduce_sum_autograd);
}

TORCH_LIBRARY_IMPL(apex, ADInplaceOrView, m) {
  m.impl("sync_batch_norm", &apex::parallel::detail::forward_in_inference_mode);
}
