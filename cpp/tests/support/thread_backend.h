// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <support/thread_backend_control.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::testing {

/// A c10d backend whose ranks are threads of one process, for CPU tensors.
///
/// Collectives return immediately. A worker thread of the control completes each one once every
/// rank has issued it. Collectives that differ between ranks at the same position fail on every
/// rank, so a wrong launch order is detected instead of averaged. A write to a tensor that is still
/// being reduced is detected as well.
///
/// Operations on a ProcessGroup with this backend are dispatched by c10d as for Gloo. It has the
/// collectives that the library issues.
class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(int rank, std::shared_ptr<ThreadBackendControl> control);

  const std::string getBackendName() const override { return "thread"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_lengths,
                                               std::vector<int64_t>& input_lengths,
                                               const c10d::AllToAllOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work> issue(const char* op, c10d::OpType type,
                                       std::vector<at::Tensor> inputs,
                                       std::vector<at::Tensor> outputs,
                                       CollectiveRecord record = {});

  const std::shared_ptr<ThreadBackendControl> control_;
};

/// The process group of `rank` on `control`. Call it once per rank, in that rank's thread. A
/// program with several groups creates several controls.
c10::intrusive_ptr<c10d::ProcessGroup> make_thread_group(
    int rank, const std::shared_ptr<ThreadBackendControl>& control);

using RankFunction =
    std::function<void(int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group)>;

/// Runs `body` once per rank, each on its own thread with its own process group, and joins all
/// threads. If a rank throws, the other ranks' collectives fail, so that their threads end as well,
/// and the first exception is thrown as std::runtime_error("rank 1: <message>"). Each rank's group
/// is registered under `group_name` (unless empty) for c10d::resolve_process_group(). Only one
/// run_ranks() at a time.
void run_ranks(int world_size, const RankFunction& body);
void run_ranks(const std::shared_ptr<ThreadBackendControl>& control, const RankFunction& body,
               const std::string& group_name = "");

}  // namespace apex::testing
