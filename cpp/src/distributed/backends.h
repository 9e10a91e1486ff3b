// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <apex/distributed/process_group.h>

/// The backends, each made in a translation unit of its own: gloo.cpp, and nccl.cpp or, in builds
/// without NCCL, no_nccl.cpp.

namespace apex::distributed {

/// 100 years. The nanoseconds of a clock end after 292, and milliseconds::max() means: no limit.
constexpr std::chrono::hours kLongestTimeout{100 * 365 * 24};

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::string group_name;
  /// Empty for the default group, as in torch.distributed.
  std::vector<uint64_t> global_ranks;
  NcclOptions nccl;
};

/// A backend of this package's own, for which the host waits as for Gloo's. It may have one of
/// those over the same ranks.
class HasGloo {
 public:
  virtual ~HasGloo() = default;
  /// @throws Error where it has none, or was shut down.
  virtual const c10::intrusive_ptr<c10d::Backend>& gloo() const = 0;
};

/// Connects to all ranks; blocks for at most the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request);

/// Another Gloo backend over all or some of the ranks of `given`, which is or has one, with its
/// options, connected through `store`, in which nothing may have used the keys before. Blocks for
/// at most the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(
    const c10::intrusive_ptr<c10d::Backend>& given, const c10::intrusive_ptr<c10d::Store>& store,
    int rank, int size);

/// How long a backend of Gloo's, or of this package's own, waits for other ranks; nothing for
/// others.
std::optional<std::chrono::milliseconds> gloo_timeout(c10d::Backend& backend);

/// By rank of a group over one of those; empty for the default group, and for other backends.
std::vector<uint64_t> gloo_global_ranks(c10d::Backend& backend);

/// Returns at once; NCCL connects at the first collective.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request);

/// A place in a stream of a GPU.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  /// Behind what the current stream was given so far. False while a graph is captured there: the
  /// mark is where it was.
  virtual bool set() = 0;
  /// Whether the stream has come there. On any thread; does not block.
  virtual bool reached() = 0;
};

/// On the current device; null in a build without NCCL.
std::unique_ptr<StreamMark> make_stream_mark();

/// Throws apex::InvalidArgument in a build without NCCL.
void require_nccl();

/// GPUs that this process sees; 0 without a driver and in a build without NCCL.
int visible_gpus();

/// Makes GPU `index` the current device of the calling thread.
void use_gpu(int index);

}  // namespace apex::distributed
