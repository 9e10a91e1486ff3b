// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>
#include <apex/parallel/detail/bucket_assignment.h>
#include <apex/parallel/detail/model_sync.h>

/// What wrappers and bindings call of a reducer, besides the members of apex::parallel::Reducer.

namespace apex::parallel {

/// A communication hook throws it if it was interrupted, for example by Ctrl-C. backward() then
/// notifies the other ranks and throws `error`.
struct HookInterrupted {
  std::exception_ptr error;
};

class Reducer;
struct ReducerOptions;

namespace detail {

class ReducerCore;

/// The options of a reducer that are set by wrappers and bindings.
struct ReducerInternals {
  /// Whether all ranks begin with the same parameters, and are therefore compared. Default: the
  /// value of `init_sync`.
  std::optional<bool> begins_alike;
  /// The program reports every step of an optimizer by optimizer_stepped(). Then check_steps
  /// compares the numbers of steps instead of the distances by which parameters have moved.
  bool steps_reported = false;
  /// Further settings, as "name=value", that the ranks compare at construction besides the options.
  std::vector<std::string> settings;
};

/// The base of Reducer. Functions that are not marked otherwise must not be called in backward. No
/// function blocks, except those of join().
class APEX_API ReducerControl {
 public:
  ReducerControl(const ReducerControl&) = delete;
  ReducerControl& operator=(const ReducerControl&) = delete;

  /// With the option `weighted`: the backwards until end_weight() are for samples of this weight.
  /// `weight` is one element on any device; it is copied, and a weight on a device is read at the
  /// end of a synchronized backward. Several backwards of the same samples count once. Weights add
  /// up while backward does not synchronize. In a synchronized backward, a weight that is missing,
  /// negative or not finite throws RankMismatch on every rank. If the weights sum to zero,
  /// gradients are zero. A backward that fails or is skipped drops its weights.
  /// @throws Error without the option, or inside another weight; InvalidArgument unless the weight
  ///         has exactly one real element.
  void begin_weight(const at::Tensor& weight);
  void begin_weight(double weight);
  void end_weight() noexcept;
  /// Takes over the weights that `other` has accumulated, when this reducer replaces it.
  void take_weight(Reducer& other);
  /// The divisor of the last synchronized backward, the same on every rank; 0 before the first.
  /// Thread safe, at any time.
  double total_weight() const;

  /// Uneven inputs. Call begin_join() on every rank before a loop whose number of backwards differs
  /// by rank, and end_join() after it. end_join() takes part in the other ranks' backwards with
  /// zeros until every rank has called it. Then it overwrites `tensors`, such as parameters and
  /// buffers, by those of a rank that had data to the end, and waits for all ranks. `tensors` must
  /// be the same list on every rank. leave_join() ends without waiting, after an exception.
  ///
  /// `divide_by_initial_world_size`: true divides gradients by the number of ranks, so that a rank
  /// without data counts as zeros. False divides by the number of ranks that still have data.
  /// `throw_on_early_termination`: as soon as a rank has run out of data, end_join() on that rank
  /// and the backwards of the others throw RankMismatch.
  ///
  /// Gradients must be cleared between two synchronized backwards; otherwise every rank throws
  /// RankMismatch. The module must not have collectives of its own. Ranks read each other's
  /// reports, so the host waits on devices other than the CPU.
  void begin_join(bool divide_by_initial_world_size = true,
                  bool throw_on_early_termination = false);
  void end_join(const std::vector<at::Tensor>& tensors);
  void leave_join() noexcept;

  /// Makes the next synchronized backward compare all parameters instead of a part, for example
  /// after loading a checkpoint on some or all ranks. Thread safe, at any time.
  void check_replicas_next();

  /// For an optimizer that is about to step these parameters. Thread safe.
  /// @throws Error if one of them is in a synchronized backward of several ranks: the step would
  /// use
  ///         this rank's gradient instead of the average.
  static void optimizer_steps(const std::vector<at::Tensor>& parameters);
  /// Reports to the reducers that own these parameters that an optimizer has stepped. Thread safe.
  static void optimizer_stepped(const std::vector<at::Tensor>& parameters);

  /// Discards the plan; the next backward records a new one. Every rank must make the same call, as
  /// for set_comm_hook().
  void rebuild_buckets();
  /// Drops the references to the process groups, so that a graph that keeps the reducer alive does
  /// not keep the groups alive. A later synchronized backward throws. Idempotent.
  void release();
  /// Calls release() on every reducer of this process without a backward in progress, and waits
  /// until the groups that reducers created are destroyed. For the end of a process. Blocks.
  static void release_all();

  /// The group that carries gradients; nullptr after release(). For communication hooks.
  c10::intrusive_ptr<c10d::ProcessGroup> communicator() const;
  ReducerOptions options() const;  ///< those of the constructor
  /// All parameters, duplicates removed.
  const std::vector<NamedTensor>& parameters() const;
  /// The current plan (indices into parameters()); nullopt before the first backward.
  std::optional<BucketPlan> plan() const;
  /// The flat buffer of each bucket of the plan, [elements], in launch order. With
  /// gradient_as_bucket_view, gradients are views of these buffers. Empty before the first
  /// backward, after a failed one, and, without gradient_as_bucket_view, after one that changed the
  /// plan.
  std::vector<at::Tensor> buffers() const;

 protected:
  ReducerControl() = default;
  ~ReducerControl() = default;

  std::shared_ptr<ReducerCore> core_;
};

}  // namespace detail
}  // namespace apex::parallel
