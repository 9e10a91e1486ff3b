// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// Making the ranks of a process group hold the same model. All functions here are collective:
/// every rank of the group has to call them in the same order. They block the host until the result
/// is on its way (CPU backends) or enqueued on the current streams (NCCL), except where they say
/// otherwise. Not thread safe with respect to other collectives on the same group. A group that is
/// null is an InvalidArgument.

namespace apex::parallel {

/// A tensor of a model, by the name that error messages use.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Checks that every rank holds the same tensors: their number, then for each its name, shape,
/// strides, dtype, layout and requires_grad. `settings` are compared first: "key=value", in the
/// same order on every rank; one that only some ranks give is a difference.
///
/// Sends 24 bytes a rank when the ranks agree. Blocks the host.
/// @throws RankMismatch on every rank, naming the first rank and the first tensor that differ from
///         rank 0's; InvalidArgument for an undefined tensor.
APEX_API void verify_same_model(const std::vector<NamedTensor>& tensors,
                                const std::vector<std::string>& settings,
                                const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Checks that the values of every tensor can be sent to other ranks. That of a tensor without
/// memory of its own can, if its parts are known (see apex/tensor_parts.h) or its operators copy
/// it. Not on the meta device, of a sparse layout or of a quantized dtype. Call it after
/// verify_same_model(): then every rank throws, or none. Sends nothing.
///
/// @param what  "parameter" or "buffer", for the error.
/// @throws InvalidArgument naming the first tensor whose values cannot be sent, and why.
APEX_API void require_sendable(const std::vector<NamedTensor>& tensors, const std::string& what,
                               const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Of one message of broadcast_coalesced().
constexpr int64_t kBroadcastBytes = int64_t{64} << 20;

/// Overwrites every tensor with that of rank `root`, bit for bit. Tensors may have any strided
/// dtype, shape, strides and device; those of one device travel together, as bytes, in messages of
/// at most `chunk_bytes`, or one tensor that is larger. Tensors without elements, on the meta
/// device, undefined, or the same tensor given twice are passed over. Expanded tensors stay
/// expanded, and of one that consists of others (apex/tensor_parts.h) those are sent. Autograd does
/// not see it. Errors name the operation `what`.
/// @throws InvalidArgument for a tensor that is not strided, CommunicationError.
APEX_API void broadcast_coalesced(const std::vector<at::Tensor>& tensors,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                  int64_t root = 0, int64_t chunk_bytes = kBroadcastBytes,
                                  const std::string& what = "broadcast");

/// Replaces every tensor by the sum over ranks times `scale`, in place; one message per dtype and
/// device. Floating and complex dtypes. Errors name the operation `what`.
/// @throws InvalidArgument for a tensor of another dtype or layout, CommunicationError.
APEX_API void all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   double scale, const std::string& what = "all-reduce");

/// The device on which small control messages of this group travel: the CPU if the group has a CPU
/// backend, else `fallback` (a device of the model).
APEX_API at::Device control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   at::Device fallback);

}  // namespace apex::parallel
