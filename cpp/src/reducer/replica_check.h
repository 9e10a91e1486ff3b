// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Checks that all ranks hold the same state.

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
// If a rank's parameters differ from those of the others, training continues without an error. The
// cause may be a flipped bit, a checkpoint loaded on some ranks only, or an optimizer that stepped
// the gradients of one rank. So each report contains a digest of a part of the state that should be
// equal. The number of the backward selects the part, so that all of it is compared every
// `replica_check_every` steps. The cost is one read of that part. If digests differ, all ranks see
// that in the same report. They then exchange the digests of all tensors, which show the ranks that
// differ from the majority, and the first tensor that differs.
//
// On request, other tensors are compared along with the parameters. Some of them must be equal,
// such as master weights. Others are often equal, such as buffers of SyncBatchNorm; a tensor that
// differs in the first round is not compared again. Frozen parameters are not compared.
//
// A rank that has loaded state sends a digest of all of it once, instead of a part. If the other
// ranks have not loaded state, their digests differ in any case, and the digests of all tensors
// decide.
//
// A digest cannot show whether a difference is intended. So by default nothing is compared if ranks
// may begin or step differently (begins_alike false, a communication hook, check_steps false), nor
// in a step whose parameters were updated after a backward of only this rank. Nothing is ever
// compared under join(), or while deferred backwards have buckets in flight.

/// The comparison of the state of all ranks. Not thread safe.
class ReplicaCheck {
 public:
  explicit ReplicaCheck(ReducerContext& context) : context_(context) {}

  /// Other tensors that should be equal: see Reducer::set_replicas().
  std::function<std::vector<Replica>()> others;
  std::function<void()> taken_over;  ///< called after resync(), if set

  /// Compares the whole state in the next backward. Call it after state was loaded.
  void compare_all_next() { all_next_ = true; }
  /// The digest of the part that this backward compares; 0 if it compares nothing. Call it when
  /// this rank has computed its gradients.
  int64_t digest(const StepFacts& facts);
  /// Call it when the digests of all ranks have been received, in a valid backward.
  void received(const StepTable& table);
  /// Call it if digests differ. Describes the ranks and tensors that differ. Empty if they may
  /// differ or were reported before. Collective; blocks the host.
  std::string locate();
  /// After locate() has reported a difference: all ranks take over the differing tensors of the
  /// majority. Collective; blocks the host. Describes whose.
  std::string resync();
  /// False if ranks differ again and again. Then something else differs, such as optimizer states.
  bool resync_helps() const { return reported_ <= kTries; }

 private:
  static constexpr int64_t kTries = 3;

  bool compares() const;
  int64_t parts() const;
  void look(bool at_others);
  bool same_lists();

  ReducerContext& context_;
  std::vector<NamedTensor> state_;  ///< the compared tensors: parameters, then others
  std::vector<bool> may_differ_;    ///< by tensor of `state_`
  size_t parameters_ = 0;           ///< number of parameters in `state_`
  std::set<std::string> differing_;
  int64_t compared_ = 0;           ///< number of parts compared
  int64_t reported_ = 0;           ///< number of differences reported
  int64_t since_reported_ = 0;     ///< parts compared since the last reported difference
  bool all_next_ = false;          ///< see compare_all_next()
  bool all_compared_ = false;      ///< the last digest is of the whole state
  bool with_buffers_ = true;       ///< tensors that may differ are compared
  int like_ = 0;                   ///< the rank whose tensors the others take over
  std::vector<at::Tensor> apart_;  ///< the tensors that they take over
};

}  // namespace apex::parallel::detail
