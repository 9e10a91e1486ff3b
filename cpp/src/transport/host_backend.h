// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A c10d backend for CPU tensors: shared memory inside a host, Gloo for everything else.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distributed/backends.h"
#include "transport/host_topology.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [The backend of a host]
//
// If all ranks of a group share memory, a HostChannel serves the collectives of data-parallel
// training: all-reduce, broadcast, all-gather, reduce-scatter, barrier. If they are on several
// hosts with the same number of ranks each, all-reduces are summed by host: see
// Note [Sums over several hosts]. Gloo does the rest: other collectives, point-to-point messages,
// coalesced collectives, sparse tensors, a monitored barrier, and groups whose ranks share no
// memory. The choice depends only on arguments that are the same on all ranks, so all ranks make
// the same choice. Tensors must be contiguous, as in NCCL.
//
// This package calls the channel itself, with a name of the collective for errors.

/// Thread safe, like HostChannel. Concurrent calls are ordered by arrival, and the order must be
/// the same on all ranks.
class HostBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  static constexpr const char* kName = "apex";

  /// Over the ranks of `request`, which `gloo` and `links` connect. Without `gloo` only the
  /// channel's collectives are available.
  HostBackend(const distributed::BackendRequest& request, c10::intrusive_ptr<Backend> gloo,
              HostLinks links);
  ~HostBackend() override { shutdown(); }

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return gloo()->allreduce_coalesced(tensors, options);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return gloo()->allreduce_sparse(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return gloo()->reduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return gloo()->allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return gloo()->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return gloo()->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return gloo()->scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return gloo()->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    return gloo()->alltoall_base(output, input, output_sizes, input_sizes, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return gloo()->alltoall(outputs, inputs, options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return gloo()->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return gloo()->recv(tensors, source, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return gloo()->recvAnysource(tensors, tag);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    gloo()->monitoredBarrier(options, wait_all_ranks);
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return shares_memory() || sums_by_host(); }
  /// A zeroed tensor of `size` elements in memory that an all-reduce does not copy.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Additions to c10d's interface, for this package.

  /// @throws Error if it has none, or was shut down.
  c10::intrusive_ptr<Backend> gloo() const;
  c10::intrusive_ptr<Backend> gloo_or_null() const { return links().gloo; }

  /// Of the ranks; empty: unknown.
  const std::vector<ProcessName>& processes() const { return processes_; }
  bool shares_memory() const { return shares_memory_; }
  bool sums_by_host() const { return sums_by_host_; }
  /// Whether all_reduce() takes such a CPU tensor.
  bool can_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) const;
  /// In shared memory, and over several hosts. `call` names it in errors.
  HostChannel::WorkPtr all_reduce(HostCall call, const at::Tensor& tensor,
                                  c10d::ReduceOp::RedOpType op);
  /// The channel between the ranks of this host.
  /// @throws Error after the backend has ended.
  std::shared_ptr<HostChannel> channel() const;
  /// A collective has failed elsewhere: abandons what is in flight in shared memory.
  void give_up(const std::string& why) noexcept;

 private:
  template <typename CallOptions>
  HostCall begin(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs,
                 Tensors outputs);
  HostLinks links() const;

  const int64_t pid_ = this_pid();
  const c10::intrusive_ptr<Options> options_;
  const bool shares_memory_, sums_by_host_;
  const std::vector<ProcessName> processes_;
  std::atomic<uint64_t> issued_{0};
  /// As set by setTimeout().
  std::atomic<std::chrono::milliseconds> timeout_{c10d::kUnsetTimeout};

  mutable std::mutex mutex_;  ///< guards what follows, which shutdown() drops while others issue
  HostLinks links_;
};

/// Creates a backend with its own Gloo backend; see connect_host().
/// @throws the error of Gloo if the ranks of `request` do not connect.
c10::intrusive_ptr<HostBackend> make_host_backend(const distributed::BackendRequest& request);

}  // namespace apex::parallel
