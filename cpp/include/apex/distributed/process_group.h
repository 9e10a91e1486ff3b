// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// Process groups for programs without Python.
///
/// A C++ program calls init_process_group() once, in every process of the job, however the job was
/// started (torchrun --no-python, srun, mpirun, by hand), and passes what it returns to
/// apex::parallel, or calls its collectives (allreduce, broadcast, ...) itself.
///
/// The keys in the store have the layout of torch.distributed.init_process_group, so processes
/// written in C++ and in Python can be ranks of one job.
///
/// All functions may be called from any thread, but, as in torch.distributed, every rank has to
/// call init_process_group(), new_group() and barrier() in the same order. While one thread waits
/// in new_group(), others may use the groups that there are.

namespace apex::distributed {

/// What only NCCL has. Unset: NCCL's own choice.
struct NcclOptions {
  /// Collectives run on a stream of high priority, so that they start before computation that was
  /// queued earlier on others.
  TORCH_ARG(bool, high_priority_stream) = false;
  /// Fewest and most thread blocks (CTAs) of a collective, from 1: more move data faster, fewer
  /// leave more of the GPU to the computation that they overlap with.
  TORCH_ARG(std::optional<int>, min_ctas);
  TORCH_ARG(std::optional<int>, max_ctas);
};

/// How a process joins a job; all of it may be left out:
///
///     apex::distributed::init_process_group(
///         "gloo", apex::distributed::ProcessGroupOptions().timeout(std::chrono::seconds(60)));
struct ProcessGroupOptions {
  /// "env://" (launcher's variables, MASTER_ADDR and MASTER_PORT), "tcp://host:port" (rank 0
  /// listens there) or "file:///path" (a file that all ranks can write, on one machine or on a
  /// file system with locks; it must not exist before).
  TORCH_ARG(std::string, init_method) = "env://";
  /// Override what the launcher says; both or neither.
  TORCH_ARG(std::optional<int>, rank);
  TORCH_ARG(std::optional<int>, world_size);
  /// Overrides LOCAL_RANK. Where nobody says it, the rank modulo the number of visible GPUs is
  /// taken for NCCL, and the rank itself by local_rank().
  TORCH_ARG(std::optional<int>, local_rank);
  /// Limit for each step: to reach rank 0, for all ranks to arrive there, to connect to each other,
  /// and for each collective. Unset: 30 minutes, 10 for NCCL (torch's defaults). At most 100 years,
  /// which longer ones are taken for.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout);
  /// GPU of this process, for NCCL. Unset: that of the local rank.
  TORCH_ARG(std::optional<int>, device_index);
  /// No effect on other backends.
  TORCH_ARG(NcclOptions, nccl);
};

/// Joins the job and returns its group, which is also registered under its name for
/// c10d::resolve_process_group(). With NCCL the process's current CUDA device is set (to
/// options.device_index, else to the local rank's GPU) before anything else uses CUDA.
/// Blocks until all ranks are there or the timeout has passed.
///
/// `backend` is "nccl" (CUDA tensors), "gloo" (CPU tensors, and CUDA tensors by way of the host),
/// "apex" (CPU tensors, over shared memory inside a host: see host_backend.h) or per device,
/// "cpu:gloo,cuda:nccl".
///
/// With Gloo, SIGPIPE is ignored from then on if it was at its default, as in Python: a rank that
/// has ended would take those along that write to it.
///
/// Under torchrun the store of its agent is used (TORCHELASTIC_USE_AGENT_STORE), otherwise rank 0
/// hosts it.
///
/// @throws apex::InvalidArgument, at once and before anything is sent: a missing or malformed
///   environment variable (named in the message), an unknown backend, impossible options.nccl, NCCL
///   without a GPU or in a
///   build without CUDA, a second call without destroy_process_group().
/// @throws apex::InvalidArgument, after the ranks have met: two ranks disagree on the world size,
///   or two processes have the same rank.
/// @throws apex::CommunicationError within the timeout: rank 0 unreachable, its port in use, ranks
///   that did not arrive.
/// @throws apex::Error, first of all, if libtorch is of another minor version than apex was built
/// for.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const std::string& backend, const ProcessGroupOptions& options = {});

/// A group of some of the ranks, e.g. for SyncBatchNorm within a machine or for a second
/// communicator. `ranks` are ranks of the default group, in any order; the new group numbers them
/// in ascending order. All ranks of the default group must call it, members or not, in the same
/// order. Returns null to ranks that are no members. `backend`: empty for that of the default
/// group. `nccl`: of this group alone, for instance fewer CTAs for gradients and high priority for
/// batch-norm statistics. Blocks members until all of them are there.
///
/// @throws apex::InvalidArgument for duplicate or unknown ranks, impossible `nccl`, or without a
///   default group.
/// @throws apex::CommunicationError when a member does not arrive in time.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    const std::vector<int>& ranks, const std::string& backend = "",
    std::optional<std::chrono::milliseconds> timeout = std::nullopt, const NcclOptions& nccl = {});

/// The same for all ranks: a second communicator.
APEX_API c10::intrusive_ptr<c10d::ProcessGroup> new_group(
    std::optional<std::chrono::milliseconds> timeout = std::nullopt, const NcclOptions& nccl = {});

/// Whether init_process_group() was called, without destroy_process_group() since. A default group
/// that torch.distributed made in Python is not seen here.
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

/// Position of this process among those of its machine: options.local_rank, else the launcher's,
/// else the rank.
/// @throws apex::InvalidArgument without a default group.
APEX_API int local_rank();

/// Blocks until every rank of `group` (null: the default group) is here.
/// @throws apex::CommunicationError when one does not come within the group's timeout.
/// @throws apex::InvalidArgument without a default group.
APEX_API void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Shuts down and forgets the default group and all groups of new_group(). Does nothing without
/// them. Groups that the caller still holds must not be used any more. A program that ends without
/// this call ends cleanly, too; with NCCL, call it so that pending collectives are ended in order.
/// In a process that was forked since they were made, it only forgets them: init_process_group()
/// may follow there.
APEX_API void destroy_process_group();

}  // namespace apex::distributed
