// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/detail/reducer_control.h>

/// The engine of data-parallel training: averages gradients over the ranks of a process group while
/// backward is still running.
///
/// Sources: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
/// Training", VLDB 2020, sections 3.2 and 4.2, for bucketed, overlapped gradient all-reduce; NVIDIA
/// Apex's DistributedDataParallel for the order of buckets, recorded in rank 0's first backward.

namespace apex::parallel {

/// What happens if ranks hold different parameters; see ReducerOptions::replica_check_every.
enum class OnDivergence {
  kRaise,  ///< backward throws RankMismatch on every rank
  kWarn,   ///< a notice (on_notice()), repeated for the 1st, 2nd, 4th, ... time
};

/// Options of the reducer. The defaults are those of NVIDIA Apex, except for the bucket size. On
/// devices other than the CPU, the options marked [host waits] make the host wait in every
/// backward.
struct ReducerOptions : detail::ReducerInternals {
  /// Size at which a bucket is closed. The default depends on the device.
  BucketLimits limits;

  /// Launch all collectives at the end of backward, in one bucket per dtype and device.
  bool delay_allreduce = false;

  /// Parameters (indices into the reducer's parameters) whose gradients close the open buckets.
  /// Buckets are then not closed by size.
  std::vector<int64_t> trigger_parameters;

  /// Leave gradients as views of the buckets' buffers. Saves a copy and the memory of one set of
  /// gradients. A view must not be detached in place, and lives until a new plan is recorded.
  bool gradient_as_bucket_view = false;

  /// Half and bfloat16 gradients are summed as float32.
  bool allreduce_always_fp32 = false;

  /// Divide the sum by the world size. If false, gradients are sums. Clear them between two
  /// synchronized backwards: otherwise the old sum is added once per rank.
  bool gradient_average = true;

  /// Divide the sum by the sum of the ranks' weights (begin_weight()) instead. If each rank's loss
  /// is a sum over its samples, this gives the gradient of the mean over the global batch, however
  /// it is split. Gradients must be cleared between two synchronized backwards. Needs
  /// gradient_average, and gradient_predivide_factor 1. [host waits]
  bool weighted = false;

  /// Gradients are multiplied by 1/f before the all-reduce and, when averaging, by f/world after.
  double gradient_predivide_factor = 1.0;

  /// Promise that no parameter gets a gradient that had none in the first backward; such a gradient
  /// is an error.
  bool static_graph = false;

  /// Broadcast parameters from rank 0 at construction.
  bool init_sync = true;
  bool ranks_begin_alike() const { return begins_alike.value_or(init_sync); }

  /// After each synchronized backward, throw NonFiniteGradient on every rank if a rank contributed
  /// an infinity or a NaN. The error names the first such rank and its first such parameter. Costs
  /// one read of the gradients. [host waits]
  bool check_finite = false;

  /// After each synchronized backward, throw RankMismatch on every rank if parameters have moved on
  /// some ranks only, or further on some ranks. The error names these ranks. A sample of 32
  /// elements is compared. On by default for parameters on the CPU, where it is free. Parameters
  /// that a program writes after a backward of only this rank, to undo that later, are not
  /// compared. [host waits]
  std::optional<bool> check_steps;

  /// If an exception ends the backward of some ranks, the other ranks skip the step, as with
  /// skip_step(), instead of throwing. With check_finite, an infinite or NaN gradient makes every
  /// rank skip the step. [host waits]
  bool skip_failed_steps = false;

  /// Compare the trainable parameters of all ranks bit for bit. Each synchronized backward compares
  /// a part; this number of backwards compares all of them. 0 turns the comparison off. The default
  /// is 100 where the comparison is free: for parameters on the CPU, with init_sync, without a
  /// communication hook, and unless check_steps is false. The default also skips steps whose
  /// parameters were updated after a backward without synchronization. Costs one read of the part.
  /// Inactive under join(). [host waits]
  std::optional<int64_t> replica_check_every;
  OnDivergence on_divergence = OnDivergence::kWarn;
};

/// Counters since construction, also with one rank, and times of the last step.
struct ReducerStatistics {
  int64_t backwards = 0;             ///< synchronized backwards that were completed
  int64_t plans_recorded = 0;        ///< times the order was recorded and a plan agreed on
  int64_t launched_in_backward = 0;  ///< collectives started by a hook, while backward was running
  int64_t launched_at_end = 0;       ///< collectives started after backward had ended
  int64_t gradients_copied = 0;      ///< gradients copied into a buffer
  int64_t reduced_in_shared_memory = 0;  ///< collectives in shared memory, all ranks on one host
  int64_t reduced_by_host = 0;  ///< summed in each host's shared memory, then between hosts
  int64_t steps_skipped = 0;    ///< backwards that ended without gradients, see skip_step()
  int64_t usage_reads = 0;      ///< backwards that used all ranks' reports to decide about
                                ///< parameters without a gradient on this rank
  /// Seconds for which the host waited in collectives during the last synchronized backward. On
  /// devices other than the CPU, streams wait instead of the host.
  double last_backward_wait_s = 0;
  /// This rank's own part of a step: seconds from the end of the synchronized backward before the
  /// last one until all buckets of the last one were launched, without the waits in collectives of
  /// this library. 0 before the second backward.
  double last_step_compute_s = 0;
};

/// Hooks the gradient accumulators of a module's parameters and keeps their gradients averaged. A
/// full bucket is launched during backward, as soon as its predecessors are. When the outermost
/// backward ends, the reducer launches the remaining buckets and waits for the results (the host
/// waits on CPU backends, the current stream on NCCL). Gradients are complete when backward()
/// returns.
///
/// The first backward records the plan and reduces at its end. A gradient of a parameter that no
/// rank used then is reduced at the end of backward, and the next backward records a plan with it.
/// - A parameter that only some ranks used gets the average, with zeros for the other ranks.
/// - A parameter that no rank used is left alone (None stays None), without a flag and without a
///   collective.
/// - Parameters may be used several times, in checkpointed segments (reentrant or not), and
///   backward may be called several times on one forward.
///
/// Every rank must freeze and unfreeze the same parameters before the same backward; otherwise that
/// backward throws RankMismatch on every rank, and all can continue once they agree and have
/// cleared the gradients. If several reducers share a parameter, the one constructed last among
/// those with an output in the graph averages its gradient; the others treat it as frozen.
///
/// If an exception ends a backward on one rank, that backward throws on every rank (or skips the
/// step: skip_failed_steps). The failed rank sends zeros for the gradients that it had not sent
/// yet. All ranks can continue with the next backward after clearing gradients. An exception in the
/// part of the graph behind the module, such as the loss, ends backward before the reducer sees a
/// gradient: the other ranks then wait for that rank's next backward. Several reducers in one graph
/// end together: if one of them throws, the others are still completed, and the first error is
/// thrown.
///
/// On devices other than the CPU, ranks read each other's reports only in a join, and with
/// check_steps, skip_failed_steps, weighted, replica_check_every or check_finite. Otherwise a
/// failed rank sends NaN instead of zeros, and the ranks do not notice that they have frozen
/// different parameters.
///
/// Thread safety: hooks may run on any number of autograd threads. The member functions may be
/// called from one thread at a time, not during backward unless they say so. Backwards of one
/// reducer must not run at the same time. The reducer may be destroyed while outputs that it
/// watches are alive: a backward through these outputs still synchronizes, unless another reducer
/// has taken its parameters; other backwards do not.
class APEX_API Reducer : public detail::ReducerControl {
 public:
  /// Verifies that all ranks hold the same parameters, broadcasts them from rank 0 (frozen ones as
  /// well), and hooks the trainable ones. Collective; blocks the host.
  ///
  /// @param parameters  all parameters, with names for error messages, in the same order on every
  ///                    rank; a tensor that appears twice counts once. Any strided floating or
  ///                    complex dtype if trainable, any dtype if frozen; any mix of devices.
  /// @param groups      process groups with the same ranks; buckets use them in turn. At least one;
  ///                    a group may be listed several times. For CPU tensors over Gloo the reducer
  ///                    creates its own groups from them, with the same timeout, so that its
  ///                    messages cannot mix with other uses of a group.
  /// @throws InvalidArgument for options that contradict each other or are out of range, and for a
  ///         parameter that is undefined, trainable but not a leaf, of a dtype that cannot be
  ///         averaged, or on the meta device; RankMismatch if the ranks differ; CommunicationError
  ///         if the group fails.
  Reducer(std::vector<NamedTensor> parameters,
          std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, ReducerOptions options = {});
  ~Reducer();

  /// Call before each forward. Detects parameters that were frozen, unfrozen, or changed dtype,
  /// device or strides. Every rank must make the same changes. Costs nanoseconds per parameter.
  void prepare_for_forward();

  /// Skips a step on all ranks together, for example after a loss that is not finite or a forward
  /// that ran out of memory. Call it on any rank before that rank's backward, or in a hook during
  /// it. The next synchronized backward of all ranks (during backward: the current one) then ends
  /// without gradients: every .grad is undefined on every rank, so an optimizer steps nothing, and
  /// step_skipped() is true. Gradients accumulated under set_synchronizing(false) are also dropped.
  ///
  /// Returns a zero loss, of shape [] and float32, for a rank that has no loss to run backward on.
  /// Does not block; its backward() takes part in the other ranks' and blocks as usual.
  ///
  /// Collectives in the module's forward or backward (SyncBatchNorm, broadcast buffers) still need
  /// every rank, so such a module must also run on the skipping rank.
  /// @throws Error on a device where ranks do not read each other's reports, and while a backward
  ///         is ending, such as in a communication hook.
  at::Tensor skip_step();

  /// Whether the last synchronized backward was skipped, the same on every rank. May be called at
  /// any time.
  bool step_skipped() const;

  /// Call with the outputs of each forward from which a loss may be computed. Their backward then
  /// takes part even if it reaches no parameter on this rank, and under reentrant checkpointing the
  /// reduction ends with the outer backward. Tensors that do not require grad are ignored.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  /// Whether a backward that starts now is synchronized. The setting is read when
  /// backward reaches the first watched output. While off, gradients accumulate locally, and the
  /// next synchronized backward reduces them. Default on. May be called at any time.
  void set_synchronizing(bool on);
  bool synchronizing() const;

  /// Replaces the all-reduce and the averaging by a hook; nullptr restores them. Every rank must
  /// make the same call. For gradients on the CPU, the next backward throws RankMismatch on every
  /// rank if some ranks did not.
  void set_comm_hook(std::shared_ptr<CommHook> hook);

  /// May be called at any time, also by other threads.
  ReducerStatistics statistics() const;
};

}  // namespace apex::parallel
