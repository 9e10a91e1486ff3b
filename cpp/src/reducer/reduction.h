// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The interface for the reduction of one bucket, the built-in implementations, and the factors
/// that make a sum an average.

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>

#include "comm/membership.h"
#include "reducer/bucket_message.h"

namespace apex::parallel::detail {

struct ReductionTraits {
  bool has_peers = true;        ///< other ranks contribute
  bool averages = false;        ///< the result is already divided by the world size
  bool runs_user_code = false;  ///< start() may fail on one rank only, and wait() may send more
  bool shares_memory = false;   ///< sums in memory shared by the ranks of one host: see HostBackend
  bool across_hosts = false;    ///< sums that way within each host first, then across hosts
};

/// The reduction of one bucket of a plan, reused in every backward:
///
///     start() -> wait() -> deliver(), or drop() at any time.
///
/// The reducer issues start() in the same order of buckets on every rank, each from one thread,
/// with the bucket's device current. `what` names bucket and operation in errors. Not thread safe.
class Reduction {
 public:
  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  virtual ~Reduction() = default;

  virtual ReductionTraits traits() const = 0;

  /// A prefix for errors, such as "all-reduce of bucket ".
  virtual std::string describe() const = 0;

  /// Begins to reduce `tensor`: bucket.tensor(). Does not wait for other ranks.
  virtual void start(const BucketMessage& bucket, const at::Tensor& tensor,
                     const std::string& what) = 0;

  /// Whether later buckets must not be started yet, because their collectives might come before the
  /// ones of this bucket.
  virtual bool holds_back_next() const { return false; }

  /// Waits for the sum: the host on CPU backends, the current stream on NCCL. A second call does
  /// nothing.
  /// @param meanwhile  see wait_collective(); may be empty.
  virtual void wait(const std::string& what, const std::function<void()>& meanwhile) = 0;

  /// After wait(): writes the sum into the message, unless it is there already.
  virtual void deliver(BucketMessage& /*bucket*/) {}

  /// Whether the sum is complete; false before start(). Does not block.
  virtual bool done() const = 0;

  /// Drops messages in flight; see BucketMessage::abandon().
  virtual void drop() noexcept = 0;
};

/// The bucket for which a reduction is chosen.
struct ReductionSite {
  at::Device device = at::Device(at::kCPU);
  at::ScalarType dtype = at::kFloat;  ///< dtype of the sum
  size_t index = 0;                   ///< of the bucket, in launch order
  GroupPtr group;
  std::vector<GroupPtr> all_groups;  ///< of the reducer, including `group`
  bool alone = false;                ///< there is only one rank
  bool plain_average = false;        ///< the wanted result is the sum divided by the world size
  std::shared_ptr<CommHook> hook;    ///< the user's hook, or null
  bool is_last = false;              ///< the last bucket of the plan
};

/// Chooses a built-in reduction.
std::unique_ptr<Reduction> choose_reduction(const ReductionSite& site);

// Note [Averages in low precision]
//
// - NCCL's AVG multiplies by 1/N before it sums, and rounds 1/N and the product to the dtype. In
//   bfloat16 that is exact if N is a power of two. For another N all averages are off by the
//   rounding of 1/N, up to 0.4 %. In float16 a value below 2^-14 N (0.06 at 1,024 ranks) becomes
//   subnormal. In float32 and float64 the error is that of one rounding.
// - A division before the sum has the same errors. So does a division after the sum that rounds 1/N
//   to the dtype: see scale_in_place().
//
// So where the collective does not divide well, gradients are summed first and divided afterwards,
// as in NVIDIA's Apex. A float16 sum may then overflow although the average would not, above 65,504
// / N: an infinity on every rank, for which a dynamic loss scaler reduces its scale. Gradients that
// underflow would not be detected. gradient_predivide_factor moves a part of the division before
// the sum, and allreduce_always_fp32 sums in float32.

struct Averaging {
  double before = 1.0;  ///< gradients are multiplied by this before they are sent
  double after = 1.0;   ///< and by this when they are unpacked
};

/// Whether NCCL's AVG rounds no more than a division: see Note [Averages in low precision].
inline bool nccl_averages_well(at::ScalarType dtype, int64_t world_size) {
  const bool power_of_two = (world_size & (world_size - 1)) == 0;
  return dtype == at::kFloat || dtype == at::kDouble || (dtype == at::kBFloat16 && power_of_two);
}

/// The factors for a bucket. The collective divides if it can and rounds well; otherwise the sum is
/// divided, see Note [Averages in low precision].
/// @param divisor     number of ranks to divide by. Under join() it may exclude ranks without data,
///                    and is known after the sum.
/// @param world_size  number of ranks by which a reduction that averages divides.
/// @param total_weight  of all ranks, with the option weighted: see Note [Weighted means].
inline Averaging averaging_of(const ReducerOptions& options, const ReductionTraits& traits,
                              at::ScalarType dtype, int64_t divisor, int64_t world_size,
                              double total_weight = 0) {
  if (options.weighted) {
    const double after = total_weight == 0 ? 0.0 : 1.0 / total_weight;
    if (traits.averages) return {1.0, after * static_cast<double>(world_size)};
    if (dtype == at::kFloat || dtype == at::kDouble) return {1.0, after};
    const double scale = std::exp2(std::ceil(std::log2(world_size)));
    return {1.0 / scale, after * scale};
  }
  const auto ranks = static_cast<double>(divisor);
  if (traits.averages) {
    return {1.0, options.gradient_average ? static_cast<double>(world_size) / ranks : 1.0};
  }
  const double factor = options.gradient_predivide_factor;
  return {1.0 / factor, options.gradient_average ? factor / ranks : 1.0};
}

/// The averaged gradient of a parameter, with `sparse_dim` sparse dimensions. A parameter without a
/// gradient has no entries. Blocks the host.
/// @param group  null with one rank.
at::Tensor average_sparse(const at::Tensor& variable, int64_t sparse_dim, const Averaging& factors,
                          const GroupPtr& group);

}  // namespace apex::parallel::detail
