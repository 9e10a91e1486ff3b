// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <support/processes.h>
#include <support/toy_model.h>

namespace apex::testing {

/// Why tests that need a GPU cannot run; empty if they can.
inline std::string why_no_gpu() {
  return c10::cuda::device_count() > 0 ? "" : "no CUDA device is visible";
}

/// Skips the test, with the reason, if there is no GPU.
#define APEX_REQUIRE_GPU()                                         \
  do {                                                             \
    const std::string apex_reason = ::apex::testing::why_no_gpu(); \
    if (!apex_reason.empty()) GTEST_SKIP() << apex_reason;         \
  } while (false)

/// Ranks over NCCL that share the first GPU. Before NCCL 2.30 each rank must pretend to be another
/// host, so that they use sockets. NCCL 2.30 has an option for it.
inline std::vector<ProcessSpec> ranks_on_one_gpu(
    const std::string& scenario, int world_size,
    const std::map<std::string, std::string>& environment = {}) {
  std::vector<ProcessSpec> specs = ranks_of(scenario, world_size, environment);
  for (size_t rank = 0; rank < specs.size(); ++rank) {
    auto& variables = specs[rank].environment;
    variables["LOCAL_RANK"] = "0";
    variables["NCCL_SOCKET_IFNAME"] = "lo";
    variables["NCCL_NET"] = "Socket";
    variables["NCCL_HOSTID"] = "rank" + std::to_string(rank);
    variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1";
  }
  return specs;
}

/// Loading CUDA and connecting NCCL takes several seconds per process.
inline RunOptions nccl_run_options() {
  RunOptions options;
  options.timeout = std::chrono::seconds(120);
  return options;
}

}  // namespace apex::testing
