// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives of synchronized batch norm.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel::detail {

/// The ranks that a layer synchronizes with.
struct Peers {
  c10::intrusive_ptr<c10d::ProcessGroup> group;  ///< null: only this rank
  std::string layer;                             ///< for errors; may be empty

  explicit operator bool() const { return static_cast<bool>(group); }
};

/// The group that c10d has registered by this name, or null.
c10::intrusive_ptr<c10d::ProcessGroup> registered_group(const std::string& name);

/// Looks up a process group by name. Returns no group for "" and for a group of one rank. Throws a
/// RuntimeError for a name that is not registered.
APEX_API Peers find_peers(c10::string_view group_name, c10::string_view layer);

/// The kind of an exchange. All ranks must run the same kind at the same time.
enum class Direction : int32_t { kForward, kBackward, kSecondDerivative };

/// Notifies the other ranks that this one refuses the arguments of an exchange, for which they
/// would wait.
APEX_API void announce_refused(const Peers& peers, Direction direction) noexcept;

/// Concatenates the `local` [n] of every rank. Blocks the stream (CUDA) or the host (CPU). On the
/// CPU it throws RankMismatch if the ranks are in different exchanges; see Note [Ranks in different
/// layers].
APEX_API at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                               int64_t channels);

/// Sums `tensor` [n] over the ranks in place. Every rank gets the same bits. Blocks and throws like
/// all_gather().
APEX_API void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction,
                         int64_t channels);

/// The sum of `tensor` over the ranks, contiguous, without autograd.
APEX_API at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                                   c10::string_view layer);

}  // namespace apex::parallel::detail
