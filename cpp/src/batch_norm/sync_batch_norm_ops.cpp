// SPDX-License-Identifier: BSD-3-Clause
// Schemas of torch.ops.apex.*, C++ calls of these operators, and their fake (Meta) and CPU kernels.

#include "batch_norm/sync_batch_norm_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <apex/parallel/sync_batch_norm.h>

namespace apex::parallel::detail {
namespace {

// Returns the output and the values that its backward needs: mean and 1 / sqrt(var + eps) in
// float64, and the number of values per channel over all ranks as int64[1].
constexpr const char* kForward =
    "sync_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
    "str group_name, str layer='') -> (Tensor, Tensor, Tensor, Tensor)";

// Returns the gradients of input, weight and bias, the last two in the dtype of the weight. A
// gradient that `needs` does not request is empty.
constexpr const char* kBackward =
    "sync_batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
    "Tensor invstd, Tensor count, bool[3] needs, str group_name, str layer='') "
    "-> (Tensor, Tensor, Tensor)";

template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

ForwardResult forward_fake(const ForwardArguments& a) {
  check(a);
  const auto float64 = a.input.options().dtype(at::kDouble);
  const c10::SymInt channels = a.input.sym_size(1);
  return {at::empty_like(in_layout(a.input)), at::empty_symint({channels}, float64),
          at::empty_symint({channels}, float64),
          at::empty({1}, a.input.options().dtype(at::kLong))};
}

BackwardResult backward_fake(const BackwardArguments& a) {
  check(a);
  const auto parameter = [&](bool needed) {
    return at::empty_symint({needed ? a.input.sym_size(1) : c10::SymInt(0)}, parameter_options(a));
  };
  return {a.needs[0] ? at::empty_like(in_layout(a.input)) : at::empty({0}, a.input.options()),
          parameter(a.needs[1]), parameter(a.needs[2])};
}

}  // namespace

ForwardResult call(const ForwardArguments& a) {
  static const auto op =
      find_operator<decltype(forward_kernel<&forward_fake>)>("apex::sync_batch_norm");
  return op.call(a.input, a.weight, a.bias, a.running_mean, a.running_var, a.num_batches_tracked,
                 a.momentum, a.eps, a.group_name, a.layer);
}

BackwardResult call(const BackwardArguments& a) {
  static const auto op =
      find_operator<decltype(backward_kernel<&backward_fake>)>("apex::sync_batch_norm_backward");
  return op.call(a.grad_output, a.input, a.weight, a.mean, a.invstd, a.count, a.needs, a.group_name,
                 a.layer);
}

}  // namespace apex::parallel::detail

TORCH_LIBRARY_FRAGMENT(apex, m) {
  using namespace apex::parallel::detail;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(kForward, tags);
  m.def(kBackward, tags);
  // Converts a process group of Python to the name that the operators take.
  m.def("process_group_name(__torch__.torch.classes.c10d.ProcessGroup group) -> str",
        &apex::parallel::process_group_name);
}

TORCH_LIBRARY_IMPL(apex, Meta, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_fake>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_fake>);
}

TORCH_LIBRARY_IMPL(apex, CPU, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_composed>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_composed>);
}
