// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <apex/export.h>

/// Collectives of tensors, for programs without Python: as torch.distributed's of the same names,
/// with errors that say who is lost. Between ranks of one host they go through shared memory.
///
/// Every rank of `group` (null: the default group) has to call the same one, with tensors of the
/// same shape and dtype. They block: the host on CPU backends, the current stream on NCCL. They may
/// be called from any thread, in the same order on every rank. None of them is recorded by
/// autograd. Ranks with other shapes, dtypes or operations are found out where they share memory;
/// elsewhere backends mix the values, or end the process, as they do for torch.distributed.
///
/// All throw apex::CommunicationError when a rank does not come within the group's timeout, has
/// ended, or is in another collective, and apex::InvalidArgument without a default group or for a
/// tensor that is undefined, not contiguous, or on the meta device.

namespace apex::distributed {

/// `tensor` becomes the sum (or what `op` says) over all ranks; the same bits on every rank. SUM,
/// PRODUCT, MIN and MAX of uint8, int8, int32, int64, float16, bfloat16, float32 and float64; AVG
/// of the floating ones, rounded once; SUM and AVG of complex64 and complex128.
/// @throws InvalidArgument for others, before anything is sent: the group stays usable.
APEX_API void all_reduce(const at::Tensor& tensor,
                         c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// `tensor` becomes that of rank `root`.
APEX_API void broadcast(const at::Tensor& tensor, int root = 0,
                        const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// `tensor` [...] of every rank, as [world_size, ...].
APEX_API at::Tensor all_gather(const at::Tensor& tensor,
                               const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Of `tensor` [world_size, ...], the sum over all ranks of the entry [...] with this rank's
/// number. float16 and bfloat16 are summed in float32.
/// @throws InvalidArgument unless the first dimension is the number of ranks, and for a dtype of
///         which all_reduce() has no SUM.
APEX_API at::Tensor reduce_scatter(const at::Tensor& tensor,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

/// Whether every rank has the same `tensor`: shape, dtype and every bit; the same answer on every
/// rank. The shapes may differ, of at most 16 dimensions. Waits for the host on every device.
APEX_API bool ranks_agree(const at::Tensor& tensor,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group = {});

}  // namespace apex::distributed
