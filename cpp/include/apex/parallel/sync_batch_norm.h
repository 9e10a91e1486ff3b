// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include <apex/export.h>

/// Synchronized batch norm: uses the statistics of all ranks of a process group. For CPU and CUDA.
///
/// Shapes: input [N, C] or [N, C, *] with any number of further dimensions, or [N, *, C] with
/// `channel_last`. Any strides; torch's channels-last memory formats are used without a copy and
/// kept in the output, other strided inputs are copied. Input dtypes: float16, bfloat16, float32,
/// float64. Elements are computed in float32 (float64 for float64). In training with several ranks,
/// per-channel tensors may have any of these dtypes and any strides, and their values are computed
/// in float64. Evaluation, and training of one rank on the CPU, are at::batch_norm.
///
/// Forward and backward are collective over the process group. They block on CPU the host, until
/// the other ranks have joined; on CUDA only the current stream, or in a build without CUDA kernels
/// also the host. Thread safety: like any torch operator; two calls must not share running
/// statistics. Supports derivatives of any order, except where at::batch_norm is used in training,
/// whose third derivative is wrong in torch 2.13. There, and in evaluation, forward-mode
/// derivatives and torch.func's transforms are supported.
///
/// Algorithm: S. Ioffe and C. Szegedy, "Batch Normalization" (2015), with mean and variance merged
/// over ranks after Chan, Golub and LeVeque (The American Statistician 37(3), 1983). One collective
/// per direction: forward all-gathers the mean, the squared deviations and the exact count in
/// float64; backward all-reduces two sums. Over sockets both are an all-to-all of Gloo.

namespace apex::parallel {

/// Options of SyncBatchNorm, set as those of torch::nn::BatchNorm2d:
///
///     apex::parallel::SyncBatchNorm norm(
///         apex::parallel::SyncBatchNormOptions(64).eps(1e-3).momentum(0.01));
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}

  /// Number of channels C; positive.
  TORCH_ARG(int64_t, num_features);
  TORCH_ARG(double, eps) = 1e-5;
  /// Of the running statistics; nullopt: average over all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  /// Input [N, *, C].
  TORCH_ARG(bool, channel_last) = false;
  TORCH_ARG(bool, fuse_relu) = false;
  /// The group in training. Null: all ranks of apex::distributed::init_process_group(), over a
  /// separate communicator, so that collectives never queue behind gradient buckets. All layers
  /// share it, and the first training forward creates it, which is collective. Without
  /// init_process_group(): this rank alone.
  TORCH_ARG(c10::intrusive_ptr<c10d::ProcessGroup>, process_group);
  /// True turns synchronization off; excludes process_group.
  TORCH_ARG(bool, this_rank_alone) = false;
};

/// The module. Parameters `weight` and `bias` and buffers `running_mean`, `running_var` and
/// `num_batches_tracked` have the names of torch::nn::BatchNorm2d, so that either module loads the
/// other's archives. In evaluation it uses the running statistics, or without them the batch's own.
///
///     torch::nn::Sequential layers(torch::nn::Conv2d(3, 64, 3), apex::parallel::SyncBatchNorm(64),
///                                  torch::nn::ReLU());
class APEX_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// Wraps existing tensors, e.g. those of a torch::nn::BatchNorm2d; undefined ones are absent.
  /// @throws InvalidArgument unless running_mean and running_var are both defined or both
  ///         undefined.
  SyncBatchNormImpl(SyncBatchNormOptions options, at::Tensor weight, at::Tensor bias,
                    at::Tensor running_mean, at::Tensor running_var,
                    at::Tensor num_batches_tracked);

  /// Creates new parameters and buffers: weight 1, bias 0, mean 0, variance 1.
  void reset() override;
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  at::Tensor forward(const at::Tensor& input, const at::Tensor& z = {});

  SyncBatchNormOptions options;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;
  /// Its name in the model, for errors; set by conversion and by DistributedDataParallel.
  std::string layer_name;

 private:
  void check_options() const;
  c10::intrusive_ptr<c10d::ProcessGroup> group_in_training() const;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};

TORCH_MODULE(SyncBatchNorm);

/// Replaces, in place, every torch::nn::BatchNorm1d/2d/3d in `model` by a SyncBatchNorm over
/// `process_group` (null: all ranks, see SyncBatchNormOptions). The replacement has the same
/// tensors, name, training flag and requires_grad. Not collective.
///
/// Only elements of torch::nn::Sequential, ModuleList and ModuleDict can be replaced, at any depth;
/// access those of the latter two as SyncBatchNormImpl afterwards. libtorch calls modules by their
/// static types, so for a BatchNorm that is a typed member of a module, and for a class derived
/// from BatchNorm, apex::InvalidArgument names it, and nothing is changed. Declare such a member as
/// apex::parallel::SyncBatchNorm, or as a Sequential that contains the BatchNorm.
APEX_API void convert_sync_batch_norm(
    torch::nn::Module& model, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group = {},
    bool channel_last = false);

}  // namespace apex::parallel
