// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Whether all ranks hold the same state.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <apex/parallel/reducer.h>

#include "reducer/context.h"
#include "step/replica_digest.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [Replicas]
//
// Ranks that hold other parameters than the others train on, and nothing fails: a bit that has
// flipped, a checkpoint loaded on some ranks, an optimizer that stepped gradients of one rank. So
// each report has a digest of a part of what should be equal, another part in each step, by the
// number of the backward, so that all of it is compared every `replica_check_every` steps: for one
// read of that part. Where digests differ, all ranks see it in the same report, and exchange those
// of all tensors, which tell who differs, from what the most ranks have, and where first.
//
// Besides the parameters that are, on request, other tensors: some of which have to be equal, as
// master weights, and others that often are, as buffers of SyncBatchNorm. What differs in the first
// round is none of these. Frozen parameters are not compared.
//
// A rank that has loaded state sends a digest of all of it once, in place of a part. If the others
// have not, their digests differ from that in any case, and those of all tensors decide.
//
// A digest cannot tell of what differs on purpose. Nothing is compared by default where ranks need
// not begin or step alike (init_sync false, a communication hook, check_steps false), nor in a step
// whose parameters were updated after a backward of this rank alone; and never under join() and
// while backwards leave buckets in flight.

/// Not thread safe.
class ReplicaCheck {
 public:
  explicit ReplicaCheck(ReducerContext& context) : context_(context) {}

  /// What else should be equal: see Reducer::set_replicas().
  std::function<std::vector<Replica>()> others;
  std::function<void()> taken_over;  ///< after resync(), where it is set

  /// Compares all of the state in the next backward, as after loading it.
  void compare_all_next() { all_next_ = true; }
  /// Of the part of this backward, when this rank has computed its gradients; 0: none is compared.
  int64_t digest(const StepFacts& facts);
  /// The digests of all ranks have been received, and count.
  void received();
  /// Digests differ: which ranks, and where. Empty: what differs may, or was told of. Collective;
  /// blocks the host.
  std::string locate();
  /// After locate() has told: of what differs, all take over what most ranks have. Collective;
  /// blocks the host.
  void resync();
  /// Not if ranks differ again and again: something else keeps them apart, as optimizer states do.
  bool resync_helps() const { return told_ <= kTries; }

 private:
  static constexpr int64_t kTries = 3;

  bool compares() const;
  int64_t parts() const;
  void look(bool at_others);
  bool same_lists();

  ReducerContext& context_;
  std::vector<NamedTensor> state_;  ///< that counts: parameters, and others
  std::vector<bool> may_differ_;    ///< of `state_`
  size_t parameters_ = 0;           ///< so many of `state_`, the first ones
  std::set<std::string> differing_;
  int64_t compared_ = 0;           ///< parts
  int64_t told_ = 0;               ///< differences
  int64_t since_told_ = 0;         ///< parts that were compared since the last one
  bool all_next_ = false;          ///< see compare_all_next()
  bool all_compared_ = false;      ///< the last digest is of all parts
  bool with_buffers_ = true;       ///< what may differ is looked at
  int like_ = 0;                   ///< the rank that the others take over from
  std::vector<at::Tensor> apart_;  ///< what they take over
};

}  // namespace apex::parallel::detail
