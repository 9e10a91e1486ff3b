// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A c10d backend for CPU tensors: over shared memory inside a host, and Gloo for the rest.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/process_state.h"
#include "distributed/backends.h"

namespace apex::parallel {

class HostChannel;
class HostHierarchy;

// Note [The backend of a host]
//
// Where all ranks of a group share memory, its collectives are those of a HostChannel. Where they
// are on several hosts, of which one has several ranks, all-reduces are those of a HostHierarchy.
// All else is Gloo's: point-to-point messages, sparse tensors, a monitored barrier, and groups
// whose ranks share no memory. What goes which way follows from the arguments that all ranks of a
// collective have in common, so that ranks that call the same meet.
//
// A collective makes progress while a rank waits for it or asks for it, as in HostChannel. Who asks
// for its future waits for it somewhere else: from the first future on, a thread of the backend
// waits for the collectives that have one, in the order in which they were issued; another one
// does, while a callback runs.
//
// Memory that is not contiguous is copied, in the order of its elements: ranks may have different
// strides.

class BackendWork;
class FutureThread;

/// Thread safe, as HostChannel is: concurrent calls are ordered by who comes first, which has to be
/// the same on all ranks.
class HostBackend final : public c10d::Backend, public distributed::HasGloo {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  static constexpr const char* kName = "apex";

  /// Connects to all ranks of `request`, over Gloo and in memory. Collective; blocks for at most
  /// the timeout.
  /// @throws CommunicationError, or what Gloo throws, if they do not come.
  explicit HostBackend(const distributed::BackendRequest& request);
  ~HostBackend() override;

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return channel_ || hierarchy_; }
  /// A zeroed tensor of `size` elements in memory from which an all-reduce copies nothing.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  const c10::intrusive_ptr<Backend>& gloo() const override;

 private:
  class Call;

  Call begin(c10d::OpType type, const char* title, std::chrono::milliseconds timeout,
             const Tensors& inputs);
  bool in_memory(const Tensors& tensors) const;
  void require_root(int64_t root, const char* what) const;
  void add_all_reduce(Call& call, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);
  void add_all_gather(Call& call, const at::Tensor& output, const at::Tensor& input);
  void add_reduce_scatter(Call& call, const at::Tensor& output, const at::Tensor& input,
                          c10d::ReduceOp::RedOpType op);
  WorkPtr all_reduce_flat(Tensors& tensors, const c10d::AllreduceOptions& options);

  const int64_t pid_ = this_pid();
  const c10::intrusive_ptr<Options> options_;
  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;  ///< of gloo_ alone: what the channel is found by
  std::shared_ptr<HostChannel> channel_;          ///< null where not all ranks share memory
  std::shared_ptr<HostHierarchy> hierarchy_;      ///< so; one of both is null
  const std::shared_ptr<FutureThread> futures_;
  std::atomic<uint64_t> issued_{0};
};

}  // namespace apex::parallel
