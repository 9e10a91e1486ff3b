// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include <apex/export.h>

/// Batch norm whose statistics are those of all ranks of a process group, for CPU and CUDA.
///
/// Shapes: input [N, C] or [N, C, *] with any number of further dimensions, or [N, *, C] with
/// `channel_last`. Any strides; torch's channels-last memory formats are computed in place and kept
/// in the output, other strided inputs are copied. dtypes: float16, bfloat16, float32, float64
/// input; per-channel tensors of any of these types and of any strides. Elements are computed in
/// float32 (float64 for float64), per-channel values in float64.
///
/// Blocking: on CPU the host, until the other ranks have come; on CUDA only the current stream.
/// Everything with a process group is collective: each of its ranks calls it, in the same order.
/// Thread safety: like any torch operator; two calls must not share running statistics.
/// Derivatives of any order are supported; forward-mode ones and torch.func's transforms on one
/// rank, and in inference.
///
/// Algorithm: S. Ioffe and C. Szegedy, "Batch Normalization" (2015), with mean and variance merged
/// over chunks, threads and ranks after Chan, Golub and LeVeque (The American Statistician 37(3),
/// 1983). One collective per direction: an all-gather of mean, squared deviations and the exact
/// count in float64, and an all-reduce of two sums; over Gloo an all-to-all each.

namespace apex::parallel {

/// What a call of sync_batch_norm needs besides the input. Absent tensors are undefined.
struct SyncBatchNormArguments {
  at::Tensor z;                    // added before the ReLU; shape and dtype of the input
  at::Tensor weight;               // [C], 1 if absent
  at::Tensor bias;                 // [C], 0 if absent
  at::Tensor running_mean;         // [C], updated in place in training
  at::Tensor running_var;          // [C], updated in place with the unbiased variance
  at::Tensor num_batches_tracked;  // one number of any type, counts training batches
  // Weight of this batch; none: average over all batches that num_batches_tracked counts (without
  // it, as in torch, the running statistics keep their values).
  std::optional<double> momentum = 0.1;
  double eps = 1e-5;
  bool channel_last = false;
  bool fuse_relu = false;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;  // null: this rank alone
  std::string layer_name;  // for errors; by it ranks notice that they are in different layers
};

/// Normalizes by the statistics of this batch over all ranks and updates the running ones.
/// Throws apex::InvalidArgument for one value per channel in all (on CUDA with a process group,
/// where the host cannot know, the running statistics keep their values instead), for fewer than
/// two dimensions, for per-channel tensors or a z that do not fit, for other dtypes, and for an
/// undefined input;
/// apex::Error with other ranks in a transform of torch.func or for a forward-mode derivative.
APEX_API at::Tensor sync_batch_norm(const at::Tensor& input,
                                    const SyncBatchNormArguments& arguments);

/// Normalizes by running_mean and running_var, which have to be there. No communication.
APEX_API at::Tensor batch_norm_inference(const at::Tensor& input,
                                         const SyncBatchNormArguments& arguments);

/// The name under which operators find `group` (torch.ops.apex.*): its own, registered here where
/// c10d does not know it, or another one where that name belongs to another group. Empty for null.
APEX_API std::string process_group_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Options of SyncBatchNorm, set as those of torch::nn::BatchNorm2d:
///
///     apex::parallel::SyncBatchNorm norm(
///         apex::parallel::SyncBatchNormOptions(64).eps(1e-3).momentum(0.01));
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}

  /// Number of channels C; positive.
  TORCH_ARG(int64_t, num_features);
  /// Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// Weight of a batch in the running statistics; none: their average over all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether there are a weight and a bias.
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  /// Input [N, *, C].
  TORCH_ARG(bool, channel_last) = false;
  TORCH_ARG(bool, fuse_relu) = false;
  /// In training. Null: all ranks of apex::distributed::init_process_group(), over a communicator
  /// of their own, so that collectives never queue behind gradient buckets; all layers share it,
  /// and the first training forward of one makes it, which is collective. This rank alone in a
  /// program that has not called init_process_group().
  TORCH_ARG(c10::intrusive_ptr<c10d::ProcessGroup>, process_group);
  /// Nothing is synchronized; excludes process_group.
  TORCH_ARG(bool, this_rank_alone) = false;
};

/// The module. Parameters `weight`, `bias`; buffers `running_mean`, `running_var`,
/// `num_batches_tracked`: named as torch::nn::BatchNorm2d's, so that archives fit both ways.
/// In evaluation it uses the running statistics, or without them those of its own batch.
///
///     torch::nn::Sequential layers(torch::nn::Conv2d(3, 64, 3), apex::parallel::SyncBatchNorm(64),
///                                  torch::nn::ReLU());
class APEX_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// A module around tensors that exist, e.g. those of a torch::nn::BatchNorm2d; undefined ones are
  /// absent.
  /// @throws InvalidArgument for a running_mean without a running_var, or the other way round.
  SyncBatchNormImpl(SyncBatchNormOptions options, at::Tensor weight, at::Tensor bias,
                    at::Tensor running_mean, at::Tensor running_var,
                    at::Tensor num_batches_tracked);

  /// Makes parameters and buffers anew: weight 1, bias 0, mean 0, variance 1.
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

  /// Its name in the model: set by conversion and by DistributedDataParallel, for errors.
  std::string layer_name;

  /// The number of spatial dimensions of the BatchNorm this was converted from (1, 2, 3), or none.
  std::optional<int> converted_from;

 private:
  void check_options() const;
  c10::intrusive_ptr<c10d::ProcessGroup> group_in_training() const;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};

TORCH_MODULE(SyncBatchNorm);

/// Replaces, in place, every torch::nn::BatchNorm1d/2d/3d in `model` by a SyncBatchNorm over
/// `process_group` (null: all ranks, see SyncBatchNormOptions) around the
/// same tensors, with the same name, training flag and requires_grad; a BatchNorm that occurs twice
/// is replaced by one module. Not collective.
///
/// What can be replaced are the elements of torch::nn::Sequential, ModuleList and ModuleDict,
/// wherever these are: in each other, or as children of modules of any type. A BatchNorm that is
/// itself a typed member of a module cannot be exchanged from outside, since libtorch's modules are
/// called by their static types: apex::InvalidArgument names it, and nothing is changed. Declare
/// such a member as apex::parallel::SyncBatchNorm, or as a Sequential with the BatchNorm in it.
/// Elements of ModuleList and ModuleDict must afterwards be asked for as SyncBatchNormImpl. A class
/// derived from BatchNorm is refused in the same way, as what it adds would be lost.
APEX_API void convert_sync_batch_norm(
    torch::nn::Module& model, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group = {},
    bool channel_last = false);

/// The same, but returns a new Sequential: `model` is left as it was, and the elements that are no
/// BatchNorms are shared with it. So a BatchNorm inside one of these is refused by name.
APEX_API torch::nn::Sequential convert_sync_batch_norm(
    const torch::nn::Sequential& model,
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group = {}, bool channel_last = false);

/// The inverse: every converted SyncBatchNorm becomes the BatchNorm it was. One that was not
/// converted, or that fuses a ReLU, is refused by name with apex::InvalidArgument.
APEX_API void revert_sync_batch_norm(torch::nn::Module& model);
APEX_API torch::nn::Sequential revert_sync_batch_norm(const torch::nn::Sequential& model);

/// For a rank that has run out of data, see Reducer::begin_join(): takes part, with a batch of no
/// samples, in what the layers over all ranks announce as JoinEvent::kCustom. `device` is the
/// model's. Collective; blocks as the layers do.
APEX_API void follow_sync_batch_norm(int64_t announced, at::Device device);

/// Sets the layer_name of every SyncBatchNorm in `model`.
APEX_API void name_layers(torch::nn::Module& model);

}  // namespace apex::parallel
