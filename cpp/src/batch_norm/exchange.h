// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The messages that the ranks of a synchronized batch norm exchange.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel::detail {

/// With whom a layer talks.
struct Peers {
  c10::intrusive_ptr<c10d::ProcessGroup> group;  ///< null: this rank alone
  std::string layer;                             ///< for errors; may be empty

  explicit operator bool() const { return static_cast<bool>(group); }
};

/// The peers of that name; nobody for "" and for a group of one rank. Throws a RuntimeError that
/// says what to do for a name nobody registered.
APEX_API Peers find_peers(c10::string_view group_name, c10::string_view layer);

/// Says which exchange it is. Ranks have to be in the same one.
enum class Direction : int32_t { kForward, kBackward, kSecondDerivative };

/// Lives while an operator checks its arguments, before its exchange. If that throws, the other
/// ranks are told, which would wait.
class APEX_API BeforeExchange {
 public:
  BeforeExchange(const Peers& peers, Direction direction);
  ~BeforeExchange();
  BeforeExchange(const BeforeExchange&) = delete;
  BeforeExchange& operator=(const BeforeExchange&) = delete;

 private:
  const Peers& peers_;
  Direction direction_;
  int exceptions_;
};

/// Every rank's `local` [n], one after the other. Blocks the stream (CUDA) or the host (CPU). Over
/// Gloo it throws RankMismatch, on every rank, where ranks are in different exchanges; see Note
/// [Ranks in different layers].
APEX_API at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                               int64_t channels);

/// Sums `tensor` [n] over the ranks, in place, to the same bits on each of them. Otherwise as
/// above.
APEX_API void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction,
                         int64_t channels);

/// The operator of that name, on every device: a contiguous sum of `tensor` over the ranks.
APEX_API at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                                   c10::string_view layer);

}  // namespace apex::parallel::detail
