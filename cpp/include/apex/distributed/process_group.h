// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// Process groups for programs without Python.
///
/// A C++ program calls init_process_group() once in every process of the job, for any launcher
/// (torchrun --no-python, srun, mpirun) or none. It passes the result to apex::parallel, or calls
/// its collectives (allreduce, broadcast, ...) directly.
///
/// The layout of the store's keys is that of torch.distributed.init_process_group, so a job can
/// have C++ and Python ranks.
///
/// All functions may be called from any thread. As in torch.distributed, every rank must call
/// init_process_group(), new_group() and barrier() in the same order. While one thread waits in
/// new_group(), other threads may use existing groups.

namespace apex::distributed {

/// How a process joins a job. All fields are optional:
///
///     apex::distributed::init_process_group(
///         "gloo", apex::distributed::ProcessGroupOptions().timeout(std::chrono::seconds(60)));
struct ProcessGroupOptions {
  /// "env://" (the launcher's variables, MASTER_ADDR and MASTER_PORT), "tcp://host:port" (rank 0
  /// listens there) or "file:///path" (a new file that all ranks can write, on one host or on a
  /// file system with locks).
  TORCH_ARG(std::string, init_method) = "env://";
  /// Override the launcher's values. Set both or neither.
  TORCH_ARG(std::optional<int>, rank);
  TORCH_ARG(std::optional<int>, world_size);
  /// Overrides LOCAL_RANK. If neither is set, NCCL uses the rank modulo the number of visible GPUs,
  /// and local_rank() returns the rank.
  TORCH_ARG(std::optional<int>, local_rank);
  /// Limit for each step: reaching rank 0, the arrival of all ranks there, connecting to each
  /// other, and each collective. Unset: 30 minutes, or 10 for NCCL (torch's defaults). Values above
  /// 100 years are treated as 100 years.
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
/// "apex" (CPU tensors, over shared memory inside a host; see host_backend.h), or a list by device,
/// "cpu:gloo,cuda:nccl".
///
/// With Gloo, SIGPIPE is ignored from then on if it had its default action, as in Python. Otherwise
/// a write to a rank that has exited would kill this process.
///
/// Under torchrun the store of its agent is used (TORCHELASTIC_USE_AGENT_STORE), otherwise rank 0
/// hosts it.
///
/// @throws apex::InvalidArgument, immediately and before anything is sent: a missing or malformed
///   environment variable (named in the message), an unknown backend, NCCL without a GPU or in a
///   build without CUDA, a second call without destroy_process_group().
/// @throws apex::InvalidArgument, after the ranks have met: two ranks disagree on the world size,
///   or two processes have the same rank.
/// @throws apex::CommunicationError within the timeout: rank 0 unreachable, its port in use, ranks
///   that did not arrive.
/// @throws apex::Error, before everything else, if libtorch has another minor version than the one
///   that apex was built for.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const std::string& backend, const ProcessGroupOptions& options = {});

/// Creates a group of some of the ranks, e.g. for SyncBatchNorm within a host or for a second
/// communicator. `ranks` are ranks of the default group, in any order; the new group numbers them
/// in ascending order. All ranks of the default group must call it in the same order. Ranks that
/// are not members get null. `backend`: empty for that of the default group. Blocks members until
/// all of them have joined.
///
/// @throws apex::InvalidArgument for duplicate or unknown ranks, or without a default group.
/// @throws apex::CommunicationError when a member does not arrive in time.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    const std::vector<int>& ranks, const std::string& backend = "",
    std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// The same, for ranks in braces.
inline c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    std::initializer_list<int> ranks, const std::string& backend = "",
    std::optional<std::chrono::milliseconds> timeout = std::nullopt) {
  return new_group(std::vector<int>(ranks), backend, timeout);
}

/// The same for all ranks, as a second communicator.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// Whether a default group exists: init_process_group() was called, and destroy_process_group() was
/// not called since. Does not see a default group that torch.distributed created in Python.
APEX_API bool is_initialized();

/// The group that init_process_group() returned.
/// @throws apex::InvalidArgument without one.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> get_default_group();

/// Rank of this process in `group` (null: the default group).
/// @throws apex::InvalidArgument without a default group.
APEX_API int rank(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Number of ranks of `group` (null: the default group).
/// @throws apex::InvalidArgument without a default group.
APEX_API int world_size(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Position of this process among those of its host: options.local_rank, else the launcher's value,
/// else the rank.
/// @throws apex::InvalidArgument without a default group.
APEX_API int local_rank();

/// Blocks until every rank of `group` (null: the default group) has called it.
/// @throws apex::CommunicationError if a rank does not call it within the group's timeout.
/// @throws apex::InvalidArgument without a default group.
APEX_API void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Shuts down and forgets the default group and all groups of new_group(). Does nothing if there
/// are none. Groups that the caller still holds must not be used any more. A program that exits
/// without this call still exits cleanly; with NCCL, call it to end pending collectives in order.
/// In a forked child it only forgets the parent's groups, and init_process_group() may follow.
/// Connections and the store end on another thread after it has returned: a program that calls
/// init_process_group() again at once uses another port (MASTER_PORT) for it.
APEX_API void destroy_process_group();

}  // namespace apex::distributed
