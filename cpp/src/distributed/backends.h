// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <apex/distributed.h>

/// Backends of process groups. Each is created in its own translation unit: gloo.cpp, and nccl.cpp
/// or, in builds without NCCL, no_nccl.cpp.

namespace apex::distributed {

/// 100 years. A clock's nanoseconds overflow after 292 years, and milliseconds::max() means no
/// limit.
constexpr std::chrono::hours kLongestTimeout{100 * 365 * 24};

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::string group_name;
  /// Empty for the default group, as in torch.distributed.
  std::vector<uint64_t> global_ranks;
};

/// Connects to all ranks; blocks for at most the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request);

/// Creates another Gloo backend over all or some of the ranks of `given`, a Gloo backend, with its
/// options. Connects through `store`, whose keys must be unused. Blocks for at most the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(
    c10d::Backend& given, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

/// Removes the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds to every backend.
c10d::Backend& unwrapped(c10d::Backend& backend);

/// The options of a Gloo backend or a backend of this package: its timeout, and the job's ranks of
/// its ranks (empty for the default group). Null for other backends.
c10::intrusive_ptr<c10d::Backend::Options> gloo_options(c10d::Backend& backend);

/// Returns immediately; NCCL connects at the first collective.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request);

/// Whether the current CUDA stream is captured into a graph.
bool is_capturing();

/// Whether the GPU has completed `work` of an NCCL backend. May be called on any thread; does not
/// block, and does not disturb a capture on another thread.
bool has_completed(c10d::Work& work);

/// Throws apex::InvalidArgument in a build without NCCL.
void require_nccl();

}  // namespace apex::distributed
