// SPDX-License-Identifier: BSD-3-Clause
#include <apex/amp/cast.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

namespace apex::amp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A cast whose backward also takes sparse gradients. torch's own node for `to` tries to make them
/// dense, and throws.
class Cast : public torch::autograd::Function<Cast> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, at::ScalarType dtype) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["dtype"] = tensor.scalar_type();
    return tensor.to(dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? gradient.to(ctx->saved_data["dtype"].toScalarType()) : gradient,
            at::Tensor()};
  }
};

}  // namespace

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  // Transforms of torch.func and forward-mode derivatives do not support C++ autograd functions,
  // and make no sparse gradients.
  const auto within_transform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  if (c10::impl::tls_is_dispatch_key_included(within_transform) ||
      tensor._fw_grad(/*level=*/0).defined())
    return tensor.to(dtype);
  return Cast::apply(tensor, dtype);
}

}  // namespace apex::amp
