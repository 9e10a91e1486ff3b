// Schemas of torch.ops.apex.*, the calls to them, their fake (Meta) kernels, and the one operator
// that is the same on every device.

#include "batch_norm/sync_batch_norm_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <apex/parallel/sync_batch_norm.h>

namespace apex::parallel::detail {
namespace {

// Results of sync_batch_norm: output, and what its backward needs: mean and 1 / sqrt(var + eps) in
// float64, and the number of values per channel over all ranks as int64[1].
constexpr const char* kForward =
    "sync_batch_norm(Tensor input, Tensor? z, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
    "float? momentum, float eps, bool channel_last, bool fuse_relu, str group_name) "
    "-> (Tensor, Tensor, Tensor, Tensor)";

// Results: gradients of input, z, weight and bias; those that `needs` does not ask for are empty,
// and that of z without a fused ReLU, too (it is grad_output itself). Without a count the
// statistics are constants, running mean and running variance of any floating type. `output` is
// given where something was added before the fused ReLU.
constexpr const char* kBackward =
    "sync_batch_norm_backward(Tensor grad_output, Tensor input, Tensor? output, Tensor? weight, "
    "Tensor? bias, Tensor mean, Tensor invstd_or_var, Tensor? count, float eps, bool channel_last, "
    "bool fuse_relu, bool[4] needs, str group_name) -> (Tensor, Tensor, Tensor, Tensor)";

constexpr const char* kInference =
    "batch_norm_inference(Tensor input, Tensor? z, Tensor? weight, Tensor? bias, "
    "Tensor running_mean, Tensor running_var, float eps, bool channel_last, bool fuse_relu) "
    "-> Tensor";

constexpr const char* kAllReduceSum = "all_reduce_sum(Tensor tensor, str group_name) -> Tensor";

template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

ForwardResult forward_fake(const at::Tensor& input, const OptionalTensor& z,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           const OptionalTensor& num_batches_tracked, std::optional<double>, double,
                           bool channel_last, bool, c10::string_view) {
  check_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                channel_last);
  check_updated(running_mean, running_var);
  const c10::SymInt channels = input.sym_size(channel_dim(input, channel_last));
  const auto float64 = input.options().dtype(at::kDouble);
  return {empty_in_layout(input, layout_of(input, channel_last)),
          at::empty_symint({channels}, float64), at::empty_symint({channels}, float64),
          at::empty({1}, input.options().dtype(at::kLong))};
}

at::Tensor inference_fake(const at::Tensor& input, const OptionalTensor& z,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const at::Tensor& running_mean, const at::Tensor& running_var, double,
                          bool channel_last, bool) {
  check_forward(input, z, weight, bias, running_mean, running_var, std::nullopt, channel_last);
  return empty_in_layout(input, layout_of(input, channel_last));
}

BackwardResult backward_fake(const at::Tensor& grad_output, const at::Tensor& input,
                             const OptionalTensor& output, const OptionalTensor& weight,
                             const OptionalTensor& bias, const at::Tensor& mean,
                             const at::Tensor& invstd_or_var, const OptionalTensor& count, double,
                             bool channel_last, bool fuse_relu, OutputMask needs,
                             c10::string_view) {
  check_backward(grad_output, input, output, weight, bias, mean, invstd_or_var, count,
                 channel_last);
  const MemoryLayout layout = layout_of(input, channel_last);
  const c10::SymInt channels = input.sym_size(channel_dim(input, channel_last));
  const auto none = [&] { return at::empty({0}, input.options()); };
  const auto parameter = [&](bool needed, const OptionalTensor& p) {
    return needed && p.has_value() && p->defined() ? at::empty_symint({channels}, p->options())
                                                   : none();
  };
  return {needs[0] ? empty_in_layout(input, layout) : none(),
          needs[1] && fuse_relu ? empty_in_layout(input, layout) : none(),
          parameter(needs[2], weight), parameter(needs[3], bias)};
}

at::Tensor all_reduce_sum_fake(const at::Tensor& tensor, c10::string_view) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

}  // namespace

ForwardResult call_forward(const at::Tensor& input, const OptionalTensor& z,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           const OptionalTensor& num_batches_tracked,
                           std::optional<double> momentum, double eps, bool channel_last,
                           bool fuse_relu, c10::string_view group_name) {
  static const auto op = find_operator<decltype(forward_fake)>("apex::sync_batch_norm");
  return op.call(input, z, weight, bias, running_mean, running_var, num_batches_tracked, momentum,
                 eps, channel_last, fuse_relu, group_name);
}

BackwardResult call_backward(const at::Tensor& grad_output, const at::Tensor& input,
                             const OptionalTensor& output, const OptionalTensor& weight,
                             const OptionalTensor& bias, const at::Tensor& mean,
                             const at::Tensor& invstd_or_var, const OptionalTensor& count,
                             double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                             c10::string_view group_name) {
  static const auto op = find_operator<decltype(backward_fake)>("apex::sync_batch_norm_backward");
  return op.call(grad_output, input, output, weight, bias, mean, invstd_or_var, count, eps,
                 channel_last, fuse_relu, needs, group_name);
}

at::Tensor call_inference(const at::Tensor& input, const OptionalTensor& z,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                          bool channel_last, bool fuse_relu) {
  static const auto op = find_operator<decltype(inference_fake)>("apex::batch_norm_inference");
  return op.call(input, z, weight, bias, running_mean, running_var, eps, channel_last, fuse_relu);
}

at::Tensor call_all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name) {
  static const auto op = find_operator<decltype(all_reduce_sum_fake)>("apex::all_reduce_sum");
  return op.call(tensor, group_name);
}

}  // namespace apex::parallel::detail

TORCH_LIBRARY_FRAGMENT(apex, m) {
  using namespace apex::parallel::detail;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(kForward, tags);
  m.def(kBackward, tags);
  m.def(kInference, tags);
  m.def(kAllReduceSum, tags);
  // How a process group of Python becomes one of the engine: as an object, which it then has a name
  // for.
  m.def("process_group_name(__torch__.torch.classes.c10d.ProcessGroup group) -> str",
        &apex::parallel::process_group_name);
}

TORCH_LIBRARY_IMPL(apex, Meta, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_fake);
  m.impl("sync_batch_norm_backward", &backward_fake);
  m.impl("batch_norm_inference", &inference_fake);
  m.impl("all_reduce_sum", &all_reduce_sum_fake);
}

TORCH_LIBRARY_IMPL(apex, CPU, m) {
  m.impl("all_reduce_sum", &apex::parallel::detail::all_reduce_sum);
}

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  m.impl("all_reduce_sum", &apex::parallel::detail::all_reduce_sum);
}
