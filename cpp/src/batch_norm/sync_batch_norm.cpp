// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/sync_batch_norm.h>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <mutex>

#include <apex/distributed.h>
#include <apex/error.h>

#include "batch_norm/sync_batch_norm_ops.h"
#include "by_group.h"
#include "torch_version.h"

namespace apex::parallel {
namespace {

using detail::OptionalTensor;

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

bool try_register(const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  try {
    c10d::register_process_group(name, group);
    return true;
  } catch (const std::exception&) {
    return false;  // the name belongs to a destroyed group
  }
}

/// The process group of all ranks. Layers for which no group was passed share it. Null if there is
/// one rank. The first call in a job is collective.
c10::intrusive_ptr<c10d::ProcessGroup> group_of_all_ranks() {
  using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  if (!apex::distributed::is_initialized()) return {};
  const auto world = apex::distributed::get_default_group();
  if (world->getSize() == 1) return {};
  static std::mutex mutex;  // guards `of` and `made`; held while the group is made
  static auto* const of = new WeakGroup{c10::intrusive_ptr<c10d::ProcessGroup>()};
  static auto* const made = new WeakGroup{c10::intrusive_ptr<c10d::ProcessGroup>()};
  const std::lock_guard<std::mutex> lock(mutex);
  auto group = made->lock();
  if (!group || of->lock() != world) {
    group = apex::distributed::new_group();
    *made = WeakGroup(group);
    *of = WeakGroup(world);
  }
  return group;
}

}  // namespace

std::string process_group_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) return "";
  // A group may not keep the name it is given, so names other than its own are remembered.
  static std::mutex mutex;  // guards `names` and `next`
  static auto* const names = new ByGroup<std::string>;
  static int64_t next = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string* const known = names->find(*group);
  if (known != nullptr &&
      (detail::registered_group(*known) == group || try_register(*known, group))) {
    return *known;
  }
  std::string own = detail::group_name_of(*group);
  if (!own.empty()) {
    const auto registered = detail::registered_group(own);
    if (registered == group || (!registered && try_register(own, group))) return own;
  }
  for (const std::string& gone : names->take_gone()) c10d::unregister_process_group(gone);
  const std::string name = "apex_group_" + std::to_string(next++);
  c10d::register_process_group(name, group);
  names->put(*group, name);
  if (own.empty()) group->setGroupName(name);
  return name;
}

SyncBatchNormImpl::SyncBatchNormImpl(SyncBatchNormOptions options_) : options(std::move(options_)) {
  check_options();
  reset();
}

void SyncBatchNormImpl::check_options() const {
  if (options.num_features() <= 0) {
    throw InvalidArgument("SyncBatchNorm: num_features is " +
                          std::to_string(options.num_features()) + "; it must be positive.");
  }
  if (options.this_rank_alone() && options.process_group()) {
    throw InvalidArgument(
        "SyncBatchNorm: this_rank_alone and process_group exclude each other; pass only one of "
        "them.");
  }
}

SyncBatchNormImpl::SyncBatchNormImpl(SyncBatchNormOptions options_, at::Tensor weight_,
                                     at::Tensor bias_, at::Tensor running_mean_,
                                     at::Tensor running_var_, at::Tensor num_batches_tracked_)
    : options(std::move(options_)) {
  const auto parameter = [this](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  const auto buffer = [this](const char* name, const at::Tensor& tensor) {
    return tensor.defined() ? register_buffer(name, tensor) : tensor;
  };
  check_options();
  if (running_mean_.defined() != running_var_.defined()) {
    throw InvalidArgument(
        "SyncBatchNorm: only one of running_mean and running_var is defined; pass both.");
  }
  options.affine(weight_.defined());
  options.track_running_stats(running_mean_.defined());
  weight = parameter("weight", weight_);
  bias = parameter("bias", bias_);
  running_mean = buffer("running_mean", running_mean_);
  running_var = buffer("running_var", running_var_);
  num_batches_tracked = buffer("num_batches_tracked", num_batches_tracked_);
}

void SyncBatchNormImpl::reset() {
  const int64_t channels = options.num_features();
  weight = register_parameter("weight", options.affine() ? at::ones({channels}) : at::Tensor(),
                              options.affine());
  bias = register_parameter("bias", options.affine() ? at::zeros({channels}) : at::Tensor(),
                            options.affine());
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", at::zeros({channels}));
    running_var = register_buffer("running_var", at::ones({channels}));
    num_batches_tracked =
        register_buffer("num_batches_tracked", at::zeros({}, at::TensorOptions(at::kLong)));
  }
}

void SyncBatchNormImpl::reset_running_stats() {
  if (options.track_running_stats()) {
    running_mean.zero_();
    running_var.fill_(1);
    if (num_batches_tracked.defined()) num_batches_tracked.zero_();
  }
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  stream << "apex::parallel::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << text(options.affine())
         << ", track_running_stats=" << text(options.track_running_stats())
         << ", channel_last=" << text(options.channel_last())
         << ", fuse_relu=" << text(options.fuse_relu()) << ")";
}

c10::intrusive_ptr<c10d::ProcessGroup> SyncBatchNormImpl::group_in_training() const {
  if (options.this_rank_alone()) return {};
  if (options.process_group()) return options.process_group();
  return group_of_all_ranks();
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& z) try {
  if (!input.defined()) throw InvalidArgument("SyncBatchNorm: the input is an undefined tensor.");
  const bool moved = options.channel_last() && input.dim() > 2;
  const at::Tensor x = moved ? input.movedim(-1, 1) : input;
  const auto group = is_training() ? group_in_training() : nullptr;
  const std::string name = group && group->getSize() > 1 ? process_group_name(group) : "";
  // The dtype of the counter may not be int64: libtorch's Module::to(dtype) also casts counters.
  const OptionalTensor w = if_defined(weight), b = if_defined(bias),
                       mean = if_defined(running_mean), var = if_defined(running_var),
                       batches = if_defined(num_batches_tracked);
  const detail::ForwardArguments a{
      x, w, b, mean, var, batches, options.momentum(), options.eps(), name, layer_name};
  at::Tensor y;
  if (!name.empty() || (is_training() && !x.is_cpu())) {
    y = std::get<0>(detail::call(a));
  } else {
    detail::check(a);
    const bool of_batch = is_training() || !mean;
    if (of_batch && x.size(1) > 0) detail::check_more_than_one_value(x, x.numel() / x.size(1));
    double factor = a.momentum.value_or(0);
    if (is_training() && batches) {
      batches->add_(1);
      if (!a.momentum) factor = 1 / batches->item<double>();
    }
    y = at::batch_norm(x, w, b, mean, var, of_batch, factor, a.eps,
                       at::globalContext().userEnabledCuDNN());
  }
  if (moved) y = y.movedim(1, -1);
  if (z.defined()) {
    TORCH_CHECK_VALUE(
        z.sizes() == y.sizes() && z.dtype() == y.dtype(), "apex sync batch norm: z is ", z.dtype(),
        " ", z.sizes(), " but the input is ", y.dtype(), " ", y.sizes(),
        "; z is added to the output, so its dtype and shape must be those of the input.");
    y = y + z;
  }
  return options.fuse_relu() ? y.relu() : y;
} catch (const c10::ValueError& error) {
  throw InvalidArgument(error.what_without_backtrace());
} catch (const c10::TypeError& error) {
  throw InvalidArgument(error.what_without_backtrace());
} catch (const c10::NotImplementedError& error) {
  throw Error(error.what_without_backtrace());
}

void name_layers(torch::nn::Module& model) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* const layer = item.value()->as<SyncBatchNormImpl>()) layer->layer_name = item.key();
  }
}

}  // namespace apex::parallel
