// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>
#include <apex/parallel/model_sync.h>

namespace apex::parallel {

/// Elements [begin, end) of a parameter, in the order in which they lie in its memory.
struct ParameterPiece {
  int64_t parameter = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// For each rank the pieces that it steps, in the order of the parameters: every element in one
/// piece, the same cost for each rank as far as that goes. Pure.
///
/// @param numels  of each parameter.
/// @param costs   of each parameter's step, not negative; empty: its number of elements. What costs
///                nothing is not stepped, as a rule.
/// @param whole   parameters are not cut: the dearest one to the rank that has least, and so on
///                (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Else ranks
///                have runs of elements, cut at multiples of 64, so that vectors of elements stay
///                whole.
/// @throws InvalidArgument for another number of costs, a negative or non-finite one, or no rank.
APEX_API std::vector<std::vector<ParameterPiece>> assign_shards(const std::vector<int64_t>& numels,
                                                                std::vector<double> costs,
                                                                int64_t ranks, bool whole);

/// Lets each rank of a group step a share of the parameters, and gives every rank the result: what
/// ShardedOptimizer is made of. Between ranks of one host the values go through shared memory. A
/// step is take_gradients(), that of an optimizer which holds tensors(), drop_gradients(), and
/// publish(). Not thread safe.
class APEX_API ParameterShards {
 public:
  /// Verifies that all ranks hold the same parameters, and broadcasts them from rank 0. Collective;
  /// blocks the host.
  ///
  /// @param parameters  in the same order on every rank; strided, without gaps in memory, and
  /// none on that of another one.
  /// @param costs,whole  see assign_shards(); the same on every rank.
  /// @throws InvalidArgument for a parameter that is undefined, a tensor subclass, or has gaps, and
  ///         for wrong costs;
  ///         RankMismatch if ranks differ; CommunicationError.
  ParameterShards(std::vector<NamedTensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const std::vector<double>& costs, bool whole);
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;

  /// More parameters, which are shared out for themselves: what a rank steps already stays with it.
  /// Collective, as the constructor. Not between take_gradients() and publish().
  void add(std::vector<NamedTensor> parameters, const std::vector<double>& costs);

  /// By rank.
  const std::vector<std::vector<ParameterPiece>>& shards() const;
  /// What this rank steps, in the order of its pieces: a parameter that it has as a whole is
  /// itself, a piece is a flat tensor on the parameter's memory. Stay the same tensors.
  const std::vector<at::Tensor>& tensors() const;

  /// Gives each piece its part of the parameter's gradient, or none where there is none. A
  /// parameter whose memory was replaced (`.data = ...`) is found again.
  /// @throws InvalidArgument for a sparse gradient, or a parameter that has another dtype, device
  /// or
  ///         number of elements than at first, naming it.
  void take_gradients();
  void drop_gradients();

  /// Gives every rank what the others have stepped. Either all of this rank's parameters are those
  /// after the step, or it throws and they are those before take_gradients(): where they lie on one
  /// device, and nobody has written to them through .data() since the last publish().
  /// Collective. Blocks the host (CPU), or is enqueued on the current stream (NCCL).
  /// @throws CommunicationError.
  void publish();

  /// Instead of publish(): this rank's step failed. Undoes what it has written to parameters since
  /// take_gradients(), and lets the others know, who throw. The group cannot be used any more. With
  /// one rank does nothing. Does not throw.
  void give_up(const std::string& why) noexcept;

 private:
  struct Form;
  struct OnDevice;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace apex::parallel
