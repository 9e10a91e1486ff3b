// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Checks that all ranks hold the same state: digests of tensors, and their comparison.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/parallel/detail/model_sync.h>

#include "reducer/context.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [Replicas]
//
// If a rank's parameters differ from those of the others, training continues without an error. The
// cause may be a flipped bit, a checkpoint loaded on some ranks only, or a step with the gradients
// of one rank. So each report contains a digest of a part of the parameters. The number of the
// backward selects the part: all of them are compared every `replica_check_every` steps, at the
// cost of one read. If digests differ, all ranks see that in the same report, and exchange the
// digests of all tensors. These show the ranks that differ from the majority, and the first tensor
// that differs.
//
// Only trainable parameters are compared. A rank may write frozen ones alone, for example a memory
// bank or a moving average. A rank that has loaded state sends a digest of all of it once, instead
// of a part, and so does each rank in its first backward. If the other ranks have not, their
// digests differ in any case, and the digests of all tensors decide.
//
// A digest cannot show whether a difference is intended. So by default nothing is compared if ranks
// may begin or step differently (begins_alike false, a communication hook, check_steps false), nor
// in a step whose parameters were updated after a backward of only this rank. Nothing is ever
// compared under join().
//
// All decisions depend only on the digests in the reports, which all ranks have received: whether a
// backward counts, whether digests of all tensors follow, and whether a difference is reported. If
// one rank compares nothing, its digest is 0, and the backward counts on no rank.

/// The size of the tensor's memory. 0 if it is not compared: a tensor without memory, a sparse
/// tensor, or one on meta.
int64_t bytes_of_state(const at::Tensor& tensor);

/// The digest of part `index` of `parts` equal parts of the memory of `tensors`, concatenated.
/// Never 0. A flipped bit changes the digest; on the CPU swapped words change it as well. Waits for
/// a device.
int64_t digest_of_part(const std::vector<NamedTensor>& tensors, int64_t index, int64_t parts);

std::vector<int64_t> digests_of(const std::vector<NamedTensor>& tensors);

/// The tensors and ranks that differ.
struct Divergence {
  std::vector<size_t> tensors;  ///< tensors that differ, in order
  std::vector<int> apart;       ///< ranks outside of the largest group of equal ranks
  bool majority = false;        ///< the largest group is more than half of the ranks
  int like = 0;                 ///< the first rank of the largest group
};
/// @param digests  [ranks * tensors], by rank.
Divergence find_divergence(const std::vector<int64_t>& digests, size_t ranks, size_t tensors);

/// The comparison of the parameters of all ranks. Only compare_all_next() is thread safe.
class ReplicaCheck {
 public:
  explicit ReplicaCheck(ReducerContext& context) : context_(context) {}

  /// Compares all parameters in the next backward. Call it after state was loaded.
  void compare_all_next() { all_next_ = true; }
  /// The digest of the part that this backward compares; 0 if it compares nothing. Call it when
  /// this rank has computed its gradients.
  /// @param trainable  by parameter; the same on every rank in a valid backward.
  int64_t digest(const StepFacts& facts, const std::vector<bool>& trainable);
  /// Call it in each valid backward whose reports were read. Describes the ranks and parameters
  /// that differ. Empty if none do, or if they were reported before. Collective if digests differ;
  /// blocks the host then.
  std::string compare(const StepTable& table);

 private:
  bool compares() const;
  int64_t parts() const;
  std::string locate();

  ReducerContext& context_;
  std::vector<NamedTensor> state_;    ///< the compared parameters
  std::vector<bool> trainable_;       ///< the set that `state_` lists
  int64_t reported_ = 0;              ///< number of differences found
  int64_t since_reported_ = 0;        ///< parts compared since the last difference
  std::atomic<bool> all_next_{true};  ///< see compare_all_next()
  bool all_compared_ = false;         ///< the last digest is of all parameters
};

}  // namespace apex::parallel::detail
