// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <support/thread_backend_control.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace apex::testing {

/// A c10d backend whose ranks are threads of one process, for CPU tensors.
///
/// Collectives return immediately. A worker thread of the control completes each one once every
/// rank has issued it and the test lets it run (ThreadBackendControl). Collectives that differ
/// between ranks at the same position fail on every rank, so a wrong launch order is detected
/// instead of averaged. A write to a tensor that is still being reduced is detected as well.
///
/// Operations on a ProcessGroup with this backend are dispatched by c10d as for Gloo.
class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(int rank, std::shared_ptr<ThreadBackendControl> control);

  const std::string getBackendName() const override { return "thread"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return control_->allocates(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_lengths,
                                               std::vector<int64_t>& input_lengths,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work> issue(const char* op, c10d::OpType type, Contribution contribution,
                                       std::chrono::milliseconds timeout);

  const std::shared_ptr<ThreadBackendControl> control_;
  std::atomic<int64_t> timeout_ms_;
};

/// The process group of `rank` on `control`. Call it once per rank, in that rank's thread. A
/// program with several groups creates several controls.
c10::intrusive_ptr<c10d::ProcessGroup> make_thread_group(
    int rank, const std::shared_ptr<ThreadBackendControl>& control);

/// While this object lives, `c10d::resolve_process_group(name)` returns `group` on the calling
/// thread and in autograd functions recorded on it. Other threads may use the same name for their
/// own groups. Only inside run_ranks(). Destroy it on the thread that created it.
class ScopedGroupName {
 public:
  ScopedGroupName(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  ~ScopedGroupName();
  ScopedGroupName(const ScopedGroupName&) = delete;
  ScopedGroupName& operator=(const ScopedGroupName&) = delete;

 private:
  const std::string name_;
};

/// The exception of run_ranks(): "rank 1: <message>".
class RankError : public std::runtime_error {
 public:
  RankError(int rank, const std::string& message, std::exception_ptr cause);
  int rank() const { return rank_; }
  /// The original exception of the rank.
  std::exception_ptr cause() const { return cause_; }

 private:
  int rank_;
  std::exception_ptr cause_;
};

using RankFunction =
    std::function<void(int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group)>;

/// Runs `body` once per rank, each on its own thread with its own process group, and joins all
/// threads. If a rank throws, the other ranks' collectives fail, so that their threads end as well.
/// The first exception is rethrown as RankError. Each rank's group is registered under `group_name`
/// (unless empty) for c10d::resolve_process_group(). Only one run_ranks() at a time.
void run_ranks(int world_size, const RankFunction& body);
void run_ranks(const std::shared_ptr<ThreadBackendControl>& control, const RankFunction& body,
               const std::string& group_name = "");

}  // namespace apex::testing
