// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <apex/export.h>

/// Collectives on tensors for programs without Python. Names and semantics are those of
/// torch.distributed; errors name the lost rank. Ranks of one host use shared memory.
///
/// Every rank of `group` (null: the default group) must call the same function, with tensors of the
/// same shape and dtype. Calls block the host on CPU backends, and the current stream on NCCL. They
/// may be made from any thread, in the same order on every rank. Autograd does not record them.
/// Over shared memory, mismatched shapes, dtypes or operations are detected. Elsewhere backends mix
/// the values or end the process, as with torch.distributed.
///
/// All functions throw apex::CommunicationError if a rank does not join within the group's timeout,
/// has exited, or is in another collective. They throw apex::InvalidArgument without a default
/// group, or for a tensor that is undefined, not contiguous, or on the meta device.

namespace apex::distributed {

/// Replaces `tensor` by the sum (or the result of `op`) over all ranks; the same bits on every
/// rank. SUM, PRODUCT, MIN and MAX take uint8, int8, int32, int64, float16, bfloat16, float32 and
/// float64. AVG takes the floating dtypes and rounds once. SUM and AVG also take complex64 and
/// complex128.
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
/// @throws InvalidArgument unless the first dimension is the number of ranks, and for a dtype that
///         SUM of all_reduce() does not take.
APEX_API at::Tensor reduce_scatter(const at::Tensor& tensor,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

}  // namespace apex::distributed
