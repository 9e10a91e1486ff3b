// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The parameters of a sharded optimizer on the CPU, in memory that the ranks of a host share.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/parallel/parameter_shards.h>

#include "comm/membership.h"

namespace apex::parallel {

inline bool is_whole(const ParameterPiece& piece, const at::Tensor& parameter) {
  return piece.begin == 0 && piece.end == parameter.numel();
}

/// The bytes of a piece of `parameter`, a tensor without gaps in its memory.
at::Tensor bytes_of(const at::Tensor& parameter, const ParameterPiece& piece);

// Note [Parameters in shared memory]
//
// Every rank has its own copy of all parameters, in memory that the other ranks can read. A rank
// steps its own pieces in place. When all ranks have done so, each rank copies the others' pieces
// directly from their memory; a step makes no other copy. (If all ranks used one set of parameters,
// no copy would be necessary. But late ranks still read old values in their backward, and a change
// that every rank makes to its parameters would be applied several times.)
//
// Until a rank copies, it has the old values of the other ranks' pieces. The other ranks use these
// to undo a step if a rank fails or ends: the memory of an ended process stays mapped. So no rank
// may change its parameters in any other way during a step. Before its step, a rank therefore
// checks whether all others have begun theirs; if one is late, the rank copies its own pieces. A
// rank that fails waits until the others have restored their pieces. The ranks must also agree on
// whether a step is complete. They coordinate this in shared memory (Control):
//
// - `outcome`, one for all ranks, is set once for each step, by the first rank that finds that all
//   have stepped, or that abandons the step. A rank whose collective fails obeys it, so all
//   surviving ranks end with the parameters from before the step, or all with those after it.
// - `changing` is set while a rank is in a step: it may need the memory of the others, and changes
//   its own pieces only.
// - `begun` is the last step that a rank has begun.
//
// When the second collective of a step completes, all ranks have copied each other's pieces.
//
// The storage of a parameter is moved into shared memory if nothing but the parameter refers to it.
// Otherwise, and after the program has replaced the memory of a parameter, the parameter is copied
// to and from its place in shared memory.
//
// A forked process has its own copy of the parameters: see HostMemory::allocate_private_in_forks().

/// Used by ParameterShards. Steps are numbered from 1. Not thread safe.
class SharedParameters {
 public:
  using Pieces = std::vector<std::vector<ParameterPiece>>;

  /// Collective; blocks the host. All ranks of `members` share memory.
  explicit SharedParameters(Membership members);
  ~SharedParameters();
  SharedParameters(const SharedParameters&) = delete;
  SharedParameters& operator=(const SharedParameters&) = delete;

  /// Moves `parameters`, whose values are the same on all ranks, into shared memory. Collective;
  /// blocks the host.
  /// @param pieces  by rank; `parameter` is an index into `parameters`.
  void add(const std::vector<at::Tensor>& parameters, const Pieces& pieces);

  /// Finds out which parameters are in shared memory now. Call it when the memory of one was
  /// replaced.
  void find_memory();

  /// Call it before this rank changes its pieces in step `number`.
  /// @param changed  whether they were changed since the last step.
  /// @throws CommunicationError if another rank has abandoned that step.
  void begin(int64_t number, const std::string& what, bool changed);

  /// Sends this rank's pieces and receives the others'. Collective; blocks the host. If it throws,
  /// call give_up().
  /// @throws CommunicationError.
  void exchange(int64_t number, const std::string& what);

  /// Abandons step `number`. If this rank has begun it, restores the values of its pieces from
  /// before the step, or receives the others' pieces if the ranks have agreed that the step is
  /// complete.
  void give_up(int64_t number);
  /// Waits until no other running rank needs this rank's parameters for step `number`, at most for
  /// some seconds. Call it after the other ranks were notified of a failure.
  void wait_for_others(int64_t number) const;

 private:
  struct Control;
  struct Arena;
  struct Copied;

  Control& control(size_t rank) const;
  bool decide(int64_t number, bool complete);
  bool all_have_begun(uint64_t number) const;
  void save();
  void receive();

  const Membership members_;
  const size_t rank_, size_;
  std::vector<at::Tensor> controls_;  ///< by rank
  std::vector<Arena> arenas_;         ///< one per add()
  /// By rank, its pieces of parameters outside of shared memory, with their places in shared
  /// memory.
  std::vector<Copied> copied_;
  /// If `is_saved_`: the bytes of this rank's pieces from before the step in progress,
  /// concatenated. Otherwise the other ranks have these bytes. Allocated on first use.
  at::Tensor saved_;
  bool is_saved_ = false;
};

}  // namespace apex::parallel
