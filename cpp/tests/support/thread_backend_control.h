// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <support/thread_collectives.h>

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace apex::testing {

class ThreadBackendControl;

/// One rank's handle on a collective. The control's worker thread completes it and runs the
/// callbacks of its future, which must not wait for another collective of the same control.
class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(int rank, c10d::OpType type, uint64_t seq, std::chrono::milliseconds timeout,
             std::vector<at::Tensor> results, std::weak_ptr<ThreadBackendControl> control);

  /// Blocks until completion. Throws the collective's error, or, after `timeout` (0: the
  /// backend's), an error that names the ranks that have not arrived.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  void abort() override;
  std::vector<at::Tensor> result() override { return results_; }
  uint64_t getSequencenumber() const override { return seq_; }
  /// Completes with the list of output tensors, or with the error.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Called once; later calls do nothing.
  void complete(std::exception_ptr error);

 private:
  const uint64_t seq_;
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> results_;
  const std::weak_ptr<ThreadBackendControl> control_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> claimed_{false};
};

/// The meeting point of one group's ranks, with which tests control their collectives. Every
/// function may be called from any thread at any time, before or after the collective was issued.
/// `seq` counts a rank's collectives on this group from 0.
class ThreadBackendControl final : public std::enable_shared_from_this<ThreadBackendControl> {
 public:
  /// `timeout` applies to every wait().
  static std::shared_ptr<ThreadBackendControl> create(
      int world_size, std::chrono::milliseconds timeout = std::chrono::seconds(20));
  ~ThreadBackendControl();
  ThreadBackendControl(const ThreadBackendControl&) = delete;
  ThreadBackendControl& operator=(const ThreadBackendControl&) = delete;

  int world_size() const;
  std::chrono::milliseconds timeout() const;

  // --- delays ---

  /// From now on, collective `seq` does not run before release(seq), even if every rank has issued
  /// it.
  void hold_all();
  /// Runs collective `seq` once all ranks have issued it. Releasing 1 before 0 completes 1 first.
  void release(uint64_t seq);

  // --- faults ---

  /// wait() on collective `seq` throws `message` on every rank; no tensor is changed.
  void fail(uint64_t seq, const std::string& message);
  /// The call that issues collective `seq` on `rank` throws `message`; wait() on the other ranks
  /// reports that.
  void fail_on_issue(uint64_t seq, int rank, const std::string& message);
  /// Every pending and every later collective fails with `message` on every rank.
  void abort(const std::string& message);
  /// `rank` will issue no more collectives: collectives that need it fail immediately.
  void leave(int rank);

  // --- memory ---

  /// From now on the backend allocates tensors; with `fails`, the allocation throws.
  void allocate_tensors(bool fails = false);
  bool allocates() const;
  /// Implements allocateTensor().
  at::Tensor allocate(int64_t size, const at::TensorOptions& options);
  /// Addresses of the tensors that it has allocated.
  std::set<const void*> allocated() const;

  // --- observation ---

  /// The collectives that `rank` has issued so far, in order.
  std::vector<CollectiveRecord> log(int rank) const;
  /// Number of collectives that `rank` has issued, in total or of one kind (`op` as in
  /// CollectiveRecord).
  size_t issued(int rank) const;
  size_t issued(int rank, const std::string& op) const;
  /// Sequence numbers in order of completion, without failed ones.
  std::vector<uint64_t> completed() const;
  /// Blocks until every rank has issued collective `seq`; throws after the timeout.
  void wait_until_issued(uint64_t seq);

  // --- for ThreadBackend ---

  c10::intrusive_ptr<ThreadWork> issue(int rank, c10d::OpType type, Contribution contribution,
                                       std::vector<at::Tensor> results,
                                       std::chrono::milliseconds timeout);
  /// "waiting for rank 1, which has issued 3 collectives": for messages.
  std::string describe_pending(uint64_t seq) const;

 private:
  struct State;
  explicit ThreadBackendControl(std::shared_ptr<State> state);

  const std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace apex::testing
