// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/model_sync.h>

namespace apex::parallel {

class Reducer;

/// Elements [begin, end) of a parameter, in memory order.
struct ParameterPiece {
  int64_t parameter = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Which parameters are split between ranks. Cuts are at multiples of 64 elements, to keep SIMD
/// vectors whole, and parameters of a few thousand elements are not cut.
enum class Cut : uint8_t {
  kNever,  ///< none: the most expensive remaining one goes to the rank with the least cost (R. L.
           ///< Graham, "Bounds on Multiprocessing Timing Anomalies", 1969)
  kFew,    ///< each rank gets runs of elements, so few parameters are split
  kEach,   ///< each rank gets an equal part of every large parameter, and so of every bucket of
           ///< gradients: for a reduce-scatter, in which all ranks then receive as much
};

/// Assigns the pieces of parameters that each rank steps, in the order of the parameters. Every
/// element is in one piece, and the ranks' costs are as equal as possible. Pure.
///
/// @param numels  of each parameter.
/// @param costs   cost of each parameter's step, not negative; empty: its number of elements. A
///                parameter of cost zero usually is in no piece.
/// @throws InvalidArgument for another number of costs, a negative or non-finite one, or no rank.
APEX_API std::vector<std::vector<ParameterPiece>> assign_shards(const std::vector<int64_t>& numels,
                                                                std::vector<double> costs,
                                                                int64_t ranks, Cut cut);

/// Each rank of a group steps a share of the parameters and sends the result to every rank.
/// ShardedOptimizer uses this class. If all ranks are on one host, CPU parameters are moved into
/// shared memory, unless something else refers to their storages. A step consists of
/// take_gradients(), the step of an optimizer that holds tensors(), drop_gradients() and publish().
/// Not thread safe.
class APEX_API ParameterShards {
 public:
  /// Verifies that all ranks hold the same parameters, and broadcasts them from rank 0. Collective
  /// over `replicas`; blocks the host.
  ///
  /// @param parameters  in the same order on every rank; strided, without gaps in memory, and not
  ///                    sharing memory with each other.
  /// @param group       the ranks that split the work.
  /// @param costs,cut  see assign_shards(); the same on every rank.
  /// @param replicas    all ranks that train the model, if `group` has only some of them, such as
  ///                    the ranks of one host. Each such group steps all parameters, with the same
  ///                    gradients. Null: `group`.
  /// @throws InvalidArgument for a parameter that is undefined, a tensor subclass, or has gaps, and
  ///         for wrong costs; RankMismatch if ranks differ; CommunicationError.
  ParameterShards(std::vector<NamedTensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const std::vector<double>& costs, Cut cut,
                  c10::intrusive_ptr<c10d::ProcessGroup> replicas = {});
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;

  /// Adds parameters, which are sharded separately: the existing assignment does not change.
  /// Collective, as the constructor. Not between take_gradients() and publish().
  void add(std::vector<NamedTensor> parameters, const std::vector<double>& costs);

  /// All parameters, in the order of the constructor's and add()'s arguments.
  const std::vector<NamedTensor>& parameters() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const;
  /// The pieces of each rank.
  const std::vector<std::vector<ParameterPiece>>& shards() const;
  /// The tensors that this rank steps, in the order of its pieces: a whole parameter is the
  /// parameter itself, and a piece is a flat view of the parameter's memory. Returns the same
  /// tensors on every call.
  const std::vector<at::Tensor>& tensors() const;

  /// A hook that replaces the all-reduce of gradients by a reduce-scatter, which sends half the
  /// bytes: after backward, a rank has the average of its pieces, and NaN elsewhere. It does not
  /// keep `all` alive.
  /// @param all      together, they have all parameters of the reducer; of several that have a
  ///                 parameter, the first counts.
  /// @param reducer  which gets the hook.
  /// @throws InvalidArgument if it has other ranks than their group(), or is made with
  ///         gradient_average=false. In backward: for a parameter that none of them has.
  static std::shared_ptr<CommHook> comm_hook(const std::vector<const ParameterShards*>& all,
                                             const Reducer& reducer);

  /// @throws CommunicationError if a step or another collective of the groups has failed on this
  ///         rank. Ranks may then have state of different steps.
  void refuse_failed() const;

  /// Gives each tensor its part of the parameter's gradient, or none if the gradient is undefined.
  /// Handles a parameter whose memory was replaced (`.data = ...`).
  /// @throws InvalidArgument for a sparse gradient, or a parameter whose dtype, device or number of
  ///         elements has changed, naming it; CommunicationError if a step or another collective of
  ///         the group has failed on this rank.
  void take_gradients();
  void drop_gradients();

  /// The gradients of tensors(), where they are defined.
  /// @throws InvalidArgument for a sparse gradient.
  std::vector<at::Tensor> gradients() const;

  /// The norm of order `norm_type` of all gradients, if each rank passes those of its share;
  /// float32 or float64, [], on the first parameter's device. Collective; blocks the host (CPU).
  /// @throws CommunicationError.
  at::Tensor total_norm(const std::vector<at::Tensor>& gradients, double norm_type) const;

  /// Sends each rank's stepped share to all ranks. Afterwards this rank's parameters have their
  /// values after the step. If it throws, they have their values from before take_gradients(),
  /// provided that they are on one device. If ranks share memory, they may instead have their
  /// values after the step, on all ranks; changes through .data() since the last publish() may also
  /// be undone. Collective. Blocks the host (CPU), or is enqueued on the current stream (NCCL):
  /// then a later collective throws, and the parameters have their values from before or after the
  /// step.
  /// @throws CommunicationError.
  void publish();

  /// Called instead of publish() if this rank's step failed. Undoes this rank's writes to
  /// parameters since take_gradients(), and makes publish() throw on the other ranks of the group.
  /// Neither the group nor `replicas` can be used any more. Does nothing with one rank. Does not
  /// throw.
  void give_up(const std::string& why) noexcept;

 private:
  struct Form;
  struct OnDevice;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace apex::parallel
