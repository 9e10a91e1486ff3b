// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The interface for the reduction of one bucket, and the built-in implementations.

#include <functional>
#include <memory>
#include <string>

#include <apex/parallel/comm_hook.h>

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

  /// Begins to reduce `tensor`: bucket.tensor(). Does not wait
  /// for other ranks.
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

std::unique_ptr<Reduction> make_all_reduce(const ReductionSite& site);
std::unique_ptr<Reduction> make_hook_reduction(const ReductionSite& site);

}  // namespace apex::parallel::detail
