// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/error.h>

/// What differs between the versions of torch that this library is built with. Nothing else in it
/// asks for a version. `scripts/matrix.sh` builds and tests it with each.

#define APEX_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace apex::parallel::detail {

/// Keeps a gradient accumulator alive: std::shared_ptr<Node> up to torch 2.12,
/// c10::intrusive_ptr<Node> since 2.13.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Whether collectives of tensors on a device of this type are possible. A group can say so itself
/// since torch 2.13.
inline bool has_backend(const c10d::ProcessGroup& group, c10::DeviceType type) {
#if APEX_TORCH_AT_LEAST(2, 13)
  return const_cast<c10d::ProcessGroup&>(group).hasBackendForDeviceType(type);
#else
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const c10::Device& device) { return device.type() == type; });
#endif
}

/// Its name in c10d's registry; empty for one without backends, which has none (a class written in
/// Python).
inline std::string group_name_of(const c10d::ProcessGroup& group) {
  return group.getDeviceTypes().empty() ? std::string() : group.getGroupName();
}

// The collectives of one tensor have new names since torch 2.13, and the old ones are deprecated.

/// `output` [ranks * n] is `input` [n] of every rank, in the order of the ranks. Does not block the
/// host.
inline c10::intrusive_ptr<c10d::Work> all_gather_single(
    c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options = {}) {
#if APEX_TORCH_AT_LEAST(2, 13)
  return group.all_gather_single(output, input, options);
#else
  return group._allgather_base(output, input, options);
#endif
}

/// `sizes` are lengths in the first dimension, by rank; empty for even ones. Does not block the
/// host.
inline c10::intrusive_ptr<c10d::Work> all_to_all_single(c10d::ProcessGroup& group,
                                                        at::Tensor& output, at::Tensor& input,
                                                        std::vector<int64_t>& output_sizes,
                                                        std::vector<int64_t>& input_sizes) {
#if APEX_TORCH_AT_LEAST(2, 13)
  return group.all_to_all_single(output, input, output_sizes, input_sizes);
#else
  return group.alltoall_base(output, input, output_sizes, input_sizes);
#endif
}

/// Tensor.grad_dtype, which not every version has: the first of these where it is there.
template <typename Tensor>
auto grad_dtype_of(const Tensor& leaf, int) -> decltype(leaf.grad_dtype()) {
  return leaf.grad_dtype();
}
template <typename Tensor>
std::optional<at::ScalarType> grad_dtype_of(const Tensor&, ...) {
  return std::nullopt;
}

/// The dtype that gradients of a leaf get, where that is not its own.
inline std::optional<at::ScalarType> other_grad_dtype(const at::Tensor& leaf) {
  const std::optional<at::ScalarType> dtype = grad_dtype_of(leaf, 0);
  return dtype == leaf.scalar_type() ? std::nullopt : dtype;
}

/// Whether a backend is one of NCCL's, by Backend::getBackendName(). Since torch 2.15,
/// `init_process_group("nccl")` makes one that calls itself "nccl2", and "nccl-lazy" is a variant
/// of it; the one before is still there.
inline bool is_nccl(const std::string& backend_name) {
  return backend_name == "nccl" || backend_name == "nccl2" || backend_name == "nccl-lazy";
}

/// Since torch 2.14 a group can be reconfigured: its rank and its size change. What was made for
/// the ranks before, such as plans and communicators, does not fit any more. The values of a group
/// are equal in earlier versions.
/// @throws apex::Error if `group` has another rank or size than the given ones.
inline void require_same_ranks(const c10d::ProcessGroup& group, int rank, int size,
                               const char* what) {
  const int rank_now = group.getRank();
  const int size_now = group.getSize();
  if (rank_now == rank && size_now == size) return;
  throw Error("rank " + std::to_string(rank_now) + " of " + std::to_string(size_now) +
              ": the process group was reconfigured; " + what + " was made when this was rank " +
              std::to_string(rank) + " of " + std::to_string(size) +
              ". Construct a new wrapper on every rank after the group has changed");
}

}  // namespace apex::parallel::detail
