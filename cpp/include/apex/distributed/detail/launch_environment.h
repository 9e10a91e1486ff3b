// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include <apex/export.h>

/// Reads a process's place in the job from the launcher's environment variables. All functions are
/// pure functions of their arguments, do not block, and may be called from any thread.

namespace apex::distributed {

/// Returns the value of an environment variable, or nullopt if it is unset or empty.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;
APEX_API std::optional<std::string> process_environment(const std::string& name);

/// The ranks that the launcher assigned.
struct LaunchRanks {
  /// "torchrun", "Open MPI", "MPI" (PMI, e.g. MPICH and Intel MPI) or "SLURM". Any launcher that
  /// sets RANK and WORLD_SIZE is called "torchrun".
  std::string launcher;
  int rank = 0;
  int world_size = 1;
  /// Among the processes of this host, if the launcher sets them.
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK (torchrun and its like); else OMPI_COMM_WORLD_RANK, _SIZE,
/// _LOCAL_RANK, _LOCAL_SIZE (Open MPI); else PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
/// (MPICH, Intel MPI); else SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID (srun). nullopt if
/// none of them is set.
///
/// @throws apex::InvalidArgument when a launcher's rank is set without its size, when a value is
///   not a number, or when the rank is not below the size.
APEX_API std::optional<LaunchRanks> read_launch_ranks(
    const EnvironmentLookup& lookup = process_environment);

/// The address on which rank 0 listens.
struct MasterAddress {
  std::string host;
  int port = 0;
};

/// Reads MASTER_ADDR and MASTER_PORT. If they are unset under SLURM, the host is the first of
/// SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST; "gpu07" of "gpu[07-09,12],login1"), and the port is
/// derived from SLURM_JOB_ID, so that two jobs on one host use different ports. If they are unset
/// under MPI, the host is 127.0.0.1 when all processes are on one host (or the first SLURM host
/// inside a SLURM job), and the port is 29500, torch's default.
///
/// @throws apex::InvalidArgument when the address is unknown (the message names the variable to
///   set), or when the port is not a number from 1 to 65535.
APEX_API MasterAddress read_master_address(const std::optional<LaunchRanks>& ranks,
                                           const EnvironmentLookup& lookup = process_environment);

/// The address in "tcp://host:port" or "tcp://[::1]:port"; nullopt for "env://".
///
/// @throws apex::InvalidArgument for anything else.
APEX_API std::optional<MasterAddress> parse_init_method(const std::string& url);

/// The backend that serves a device type.
struct DeviceBackend {
  c10::DeviceType device = c10::DeviceType::CPU;
  /// "gloo", "nccl" or "apex".
  std::string backend;
};

/// Parses a backend string. "gloo" serves CPU and CUDA, "nccl" CUDA, "apex" the CPU;
/// "cpu:gloo,cuda:nccl" lists backends by device.
///
/// @throws apex::InvalidArgument for anything else.
APEX_API std::vector<DeviceBackend> parse_backend(const std::string& backend);

/// The GPU index of a process: its local rank. If CUDA_VISIBLE_DEVICES names one GPU only (as with
/// SLURM's --gpus-per-task=1), the index is 0.
///
/// @throws apex::InvalidArgument when there are no GPUs or fewer than the local rank needs.
APEX_API int choose_gpu(int local_rank, int visible_gpus,
                        const EnvironmentLookup& lookup = process_environment);

}  // namespace apex::distributed
