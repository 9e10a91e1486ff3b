// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <apex/export.h>

/// Process groups, collectives and logging for programs without Python.
///
/// A C++ program calls init_process_group() once in every process of the job, for any launcher
/// (torchrun --no-python, srun, mpirun) or none. The layout of the store's keys is that of
/// torch.distributed.init_process_group, so a job can have C++ and Python ranks.
///
/// All functions may be called from any thread. As in torch.distributed, every rank must call
/// init_process_group(), new_group() and all collectives of a group in the same order. While one
/// thread waits in new_group(), other threads may use existing groups.

namespace apex::distributed {

/// How a process joins a job. All fields are optional:
///
///     apex::distributed::init_process_group(
///         "gloo", apex::distributed::ProcessGroupOptions().timeout(std::chrono::seconds(60)));
struct ProcessGroupOptions {
  /// "env://" (the launcher's variables, MASTER_ADDR and MASTER_PORT), or "tcp://host:port" (rank 0
  /// listens there; port 0 is any free port, for a job of one process).
  TORCH_ARG(std::string, init_method) = "env://";
  /// Override the launcher's values. Set both or neither.
  TORCH_ARG(std::optional<int>, rank);
  TORCH_ARG(std::optional<int>, world_size);
  /// Overrides LOCAL_RANK. If neither is set, NCCL uses the rank modulo the number of visible GPUs,
  /// and local_rank() returns the rank.
  TORCH_ARG(std::optional<int>, local_rank);
  /// Limit for each step: reaching rank 0, the arrival of all ranks there, connecting to each
  /// other, and each collective; at most 100 years. Unset: 30 minutes, or 10 for NCCL (torch's
  /// defaults).
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout);
  /// GPU of this process, for NCCL. Unset: the GPU of the local rank.
  TORCH_ARG(std::optional<int>, device_index);
};

/// Joins the job and returns its group, which is also registered under its name for
/// c10d::resolve_process_group(). With NCCL it sets the process's current CUDA device
/// (options.device_index, else the local rank's GPU) before any other use of CUDA. Blocks until all
/// ranks have joined or the timeout has passed.
///
/// `backend` is "nccl" (CUDA tensors), "gloo" (CPU tensors, and CUDA tensors through the host),
/// "apex" (CPU tensors; see add_host_backend()), or a list by device, "cpu:gloo,cuda:nccl".
///
/// With Gloo, SIGPIPE is ignored from then on if it had its default action, as in Python. Otherwise
/// a write to a rank that has exited would kill this process. The store is that of torchrun's agent
/// (TORCHELASTIC_USE_AGENT_STORE), otherwise rank 0 hosts it.
///
/// @throws apex::InvalidArgument, immediately and before anything is sent: a missing or malformed
///   environment variable (named in the message), an unknown backend, NCCL without a GPU or in a
///   build without CUDA, a second call without destroy_process_group().
/// @throws apex::CommunicationError within the timeout: rank 0 unreachable, its port in use, ranks
///   that did not arrive.
/// @throws apex::Error, before everything else, if libtorch has another minor version than the one
///   that apex was built for.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const std::string& backend, const ProcessGroupOptions& options = {});

/// Creates a group of some of the ranks, e.g. for SyncBatchNorm within a host; new_group() of all,
/// as a second communicator. `ranks` are ranks of the default group, in any order; the new group
/// numbers them in ascending order. Ranks that are not members get null. `backend`: empty for that
/// of the default group. Blocks members until all of them have joined.
/// @throws apex::InvalidArgument for duplicate or unknown ranks, or without a default group;
///   apex::CommunicationError when a member does not arrive in time.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    const std::vector<int>& ranks, const std::string& backend = "",
    std::optional<std::chrono::milliseconds> timeout = std::nullopt);
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group();

/// Shuts down and forgets the default group and all groups of new_group(). Does nothing if there
/// are none. Groups that the caller still holds must not be used any more. A program that exits
/// without this call still exits cleanly; with NCCL, call it to end pending collectives in order.
/// Not in a forked child, which cannot use the parent's groups.
/// Connections and the store end on another thread after it has returned: a program that calls
/// init_process_group() again at once uses another port (MASTER_PORT) for it.
APEX_API void destroy_process_group();

/// Whether a launcher has set this process's rank in the environment: torchrun (RANK), Open MPI,
/// MPI with PMI, or SLURM.
/// @throws apex::InvalidArgument if the launcher's variables are incomplete or malformed.
APEX_API bool is_launched();

/// Whether there is a default group of init_process_group(); not one that Python created.
APEX_API bool is_initialized();

/// The default group; this process's rank in `group`, and number of its ranks (null: the default
/// group); its position on its host (options.local_rank, else the launcher's value, else the rank).
/// @throws apex::InvalidArgument without a default group.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> get_default_group();
APEX_API int rank(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});
APEX_API int world_size(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});
APEX_API int local_rank();

// Collectives on tensors. Names and semantics are those of torch.distributed; errors name the lost
// rank. Ranks of one host use shared memory, but for reduce_scatter().
//
// Every rank of `group` (null: the default group) must call the same function, with tensors of the
// same shape and dtype. Calls block the host on CPU backends, and the current stream on NCCL.
// Autograd does not record them. Over shared memory, mismatched shapes, dtypes or operations are
// detected. Elsewhere backends mix the values or end the process, as with torch.distributed.
//
// All functions throw apex::CommunicationError if a rank does not join within the group's timeout,
// has exited, or is in another collective. They throw apex::InvalidArgument without a default
// group, or for a tensor that is undefined, not contiguous, or on the meta device.

/// Blocks until every rank of `group` has called it.
APEX_API void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Replaces `tensor` by the sum (or the result of `op`) over all ranks; the same bits on every
/// rank. SUM, PRODUCT, MIN and MAX take uint8, int8, int32, int64, float16, bfloat16, float32 and
/// float64. SUM also takes complex64 and complex128.
/// @throws InvalidArgument for other dtypes, before anything is sent: the group stays usable.
APEX_API void all_reduce(const at::Tensor& tensor,
                         c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Overwrites `tensor` with that of rank `root`.
APEX_API void broadcast(const at::Tensor& tensor, int root = 0,
                        const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Gathers `tensor` [...] of every rank into a tensor [world_size, ...].
APEX_API at::Tensor all_gather(const at::Tensor& tensor,
                               const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Sums `tensor` [world_size, ...] over all ranks, and returns the entry [...] at this rank's
/// index. float16 and bfloat16 are summed in float32.
/// @throws InvalidArgument for another first dimension, or a dtype that all_reduce() does not sum.
APEX_API at::Tensor reduce_scatter(const at::Tensor& tensor,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Adds the c10d backend "apex" for CPU tensors to `group`, as init_process_group("apex") does, for
/// programs that create their process groups themselves. It runs collectives over shared memory
/// between the ranks of a host, and over Gloo otherwise.
///
///     #include <torch/csrc/distributed/c10d/TCPStore.hpp>
///     #include <apex/distributed.h>
///
///     const auto store = c10::make_intrusive<c10d::TCPStore>("host-of-rank-0");
///     auto group = c10::make_intrusive<c10d::ProcessGroup>(store, /*rank=*/0, /*size=*/2);
///     apex::distributed::add_host_backend(group, std::chrono::minutes(5));
///     std::vector<at::Tensor> tensors{at::ones({1000})};
///     group->allreduce(tensors)->wait();
///
/// Sums are in rank order, so every rank has the same bits. A collective makes progress while a
/// rank waits for it or polls it; a thread makes that of asynchronous ones. Collective over the
/// ranks of `group`; blocks until all have connected. No other group may use the keys of its store.
///
/// @param timeout  for connecting, and for each collective.
/// @param name, global_ranks  for errors: the group's name, and the job's rank of each of its ranks
///                            (empty: they are equal).
/// @throws apex::InvalidArgument if `group` has no store, or `timeout` is not positive;
///   apex::CommunicationError if a rank does not connect within the timeout.
APEX_API void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               std::chrono::milliseconds timeout, const std::string& name = "",
                               const std::vector<uint64_t>& global_ranks = {});

}  // namespace apex::distributed
