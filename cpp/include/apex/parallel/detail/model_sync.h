// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// Functions that make the ranks of a process group hold the same model. All of them are
/// collective: every rank of the group must call them in the same order. Unless stated otherwise,
/// they block the host until the result is written (CPU backends) or enqueued on the current
/// streams (NCCL). Not thread safe with respect to other collectives on the same group. A null
/// group throws InvalidArgument.

namespace apex::parallel {

/// A tensor of a model, with the name that error messages use.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// From a torch::OrderedDict, such as named_parameters() of a module.
template <typename Dict>
std::vector<NamedTensor> named_tensors(const Dict& dict) {
  std::vector<NamedTensor> result;
  for (const auto& item : dict) result.push_back({item.key(), item.value()});
  return result;
}

/// Checks that every rank holds the same tensors: first their number, then the name, shape,
/// strides, dtype, layout and requires_grad of each. `settings` ("key=value") are compared before
/// the tensors, and must be in the same order on every rank. A setting that only some ranks have is
/// a mismatch.
///
/// Sends 24 bytes per rank when the ranks agree. Blocks the host.
/// @throws RankMismatch on every rank, naming the first rank and the first tensor that differ from
///         rank 0's; InvalidArgument for an undefined tensor.
APEX_API void verify_same_model(const std::vector<NamedTensor>& tensors,
                                const std::vector<std::string>& settings,
                                const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Checks that the values of every tensor can be sent to other ranks. Tensors on the meta device,
/// of sparse layout or of a quantized dtype cannot. Call it after verify_same_model(), so that
/// either every rank throws or none. Does not communicate.
///
/// @param what  "parameter" or "buffer", for the error.
/// @throws InvalidArgument naming the first tensor whose values cannot be sent, and why.
APEX_API void require_sendable(const std::vector<NamedTensor>& tensors, const std::string& what,
                               const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Largest message of a broadcast. Each rank copies tensors into one: with 32 MiB, fresh pages made
/// a construction over shared memory take 2.6 times as long, and malloc kept them.
constexpr int64_t kBroadcastBytes = int64_t{4} << 20;

/// Overwrites every tensor with rank `root`'s, bit for bit. Tensors may have any strided dtype,
/// shape, strides and device. Tensors on one device are sent together as bytes, in messages of at
/// most `chunk_bytes`, or one tensor if it is larger. Skips tensors that are empty, undefined, on
/// the meta device, or subclasses without memory, and duplicates. Expanded tensors stay expanded.
/// Autograd does not record it. Errors name the operation `what`.
/// @throws InvalidArgument for a tensor that is not strided, CommunicationError.
APEX_API void broadcast_coalesced(const std::vector<at::Tensor>& tensors,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                  int64_t root = 0, int64_t chunk_bytes = kBroadcastBytes,
                                  const std::string& what = "broadcast");

/// The bytes that rank `root` passes, on every rank. Other ranks' `text` is not read. Blocks the
/// host. Errors name the operation `what`.
/// @throws CommunicationError.
APEX_API std::string broadcast_text(const std::string& text,
                                    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                    int64_t root, const std::string& what);

/// Replaces every tensor, in place, by the sum over ranks times `scale`. Sends one message per
/// dtype and device. Takes floating and complex dtypes. Errors name the operation `what`.
/// @throws InvalidArgument for a tensor of another dtype or layout, CommunicationError.
APEX_API void all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   double scale, const std::string& what = "all-reduce");

/// The device for small control messages of this group: the CPU if the group has a CPU backend,
/// else `fallback` (a device of the model); if that is the CPU, the current device of a backend.
APEX_API at::Device control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   at::Device fallback);

}  // namespace apex::parallel
