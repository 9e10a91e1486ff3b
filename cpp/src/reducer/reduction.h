// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// How one bucket becomes its sum: the interface that the reducer knows, and the built-in answers,
/// one source each.

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>

#include <apex/parallel/comm_hook.h>

#include "comm/membership.h"
#include "reducer/bucket_message.h"

namespace apex::parallel::detail {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

struct ReductionTraits {
  bool has_peers = true;  ///< other ranks contribute
  bool averages = false;  ///< the result is divided by the world size already
  bool has_later_messages =
      false;                    ///< collectives follow that of start(): in next_phase() or wait()
  bool starts_at_wait = false;  ///< start() sends nothing
  bool runs_user_code = false;  ///< start() may fail on one rank alone
  bool fails_together = false;  ///< but is a CommunicationError then; see Note [Hooks that fail]
  bool shares_memory = false;   ///< between ranks of one host: see HostBackend
  bool across_hosts = false;    ///< inside each host first: so
};

/// One for each bucket of a plan, used in one backward after the other:
///
///     start() -> next_phase() while has_next_phase() -> wait() -> deliver(), or drop() at any
///     time.
///
/// The reducer issues start() and next_phase() in the same order of buckets on every rank, each
/// from one thread, with the bucket's device current. `what` names bucket and operation in errors.
/// Not thread safe.
class Reduction {
 public:
  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  virtual ~Reduction() = default;

  virtual ReductionTraits traits() const = 0;

  /// For errors: "all-reduce of bucket ".
  virtual std::string describe() const = 0;

  /// Begins to reduce `tensor`: bucket.tensor(), or what bucket.absent() gave. Does not wait for
  /// other ranks.
  virtual void start(const BucketMessage& bucket, const at::Tensor& tensor,
                     const std::string& what) = 0;

  /// The buckets behind this one may not be started yet: its collectives might come after theirs.
  virtual bool holds_back_next() const { return false; }

  /// Of a reduction that takes several collectives: whether another is to be issued when this one
  /// has ended.
  virtual bool has_next_phase() const { return false; }
  /// Waits for the present one and issues it.
  virtual void next_phase(const std::string& /*what*/) {}

  /// Waits for the sum: the host on CPU backends, the current stream on NCCL. The second time it
  /// does nothing.
  /// @param meanwhile  see wait_collective(); may be empty.
  virtual void wait(const std::string& what, const std::function<void()>& meanwhile) = 0;

  /// Backward returns before wait(): the other ranks must not need this one until then.
  virtual void leave() {}

  /// After wait(): puts the sum into the message, if it is not there already.
  virtual void deliver(BucketMessage& /*bucket*/) {}

  /// Whether the sum is there; false before start(). Does not block.
  virtual bool done() const = 0;

  /// Completed when the sum is there; null where nothing tells.
  virtual FuturePtr future() const { return nullptr; }

  /// Lets go of what is in flight; see BucketMessage::abandon().
  virtual void drop() noexcept = 0;
};

/// Where a reduction is needed.
struct ReductionSite {
  BucketMessage::Kind kind = BucketMessage::Kind::kFlat;
  at::Device device = at::Device(at::kCPU);
  at::ScalarType dtype = at::kFloat;  ///< in which gradients are summed
  size_t index = 0;                   ///< of the bucket, in the order of launches
  GroupPtr group;
  std::vector<GroupPtr> all_groups;  ///< of the reducer, this one included
  bool alone = false;                ///< there is one rank
  bool plain_average = false;        ///< the result wanted is the sum divided by the world size
  std::shared_ptr<CommHook> hook;    ///< of the user, or null
  bool last_of_hook = false;         ///< the last bucket of the plan that the hook is given
};

/// The built-in choice.
std::unique_ptr<Reduction> choose_reduction(const ReductionSite& site);

std::unique_ptr<Reduction> make_all_reduce(const ReductionSite& site);
std::unique_ptr<Reduction> make_hook_reduction(const ReductionSite& site);
std::unique_ptr<Reduction> make_sparse_reduction(const ReductionSite& site);
/// With one rank: the sum is there already, and handing a message to a backend costs more than the
/// rest of a step does.
std::unique_ptr<Reduction> make_local_reduction();

}  // namespace apex::parallel::detail
