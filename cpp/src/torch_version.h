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

/// Compatibility layer over the supported versions of torch. No other file of this library checks
/// the version. Continuous integration builds and tests with each version.

#define APEX_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace apex::parallel::detail {

/// Keeps a gradient accumulator alive: std::shared_ptr<Node> up to torch 2.12,
/// c10::intrusive_ptr<Node> since 2.13.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Whether the group supports collectives of tensors on this type of device. c10d has a function
/// for this since torch 2.13.
inline bool has_backend(const c10d::ProcessGroup& group, c10::DeviceType type) {
#if APEX_TORCH_AT_LEAST(2, 13)
  return const_cast<c10d::ProcessGroup&>(group).hasBackendForDeviceType(type);
#else
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const c10::Device& device) { return device.type() == type; });
#endif
}

/// The name of the group in c10d's registry. Empty for a group without backends (a class written in
/// Python), which has no name.
inline std::string group_name_of(const c10d::ProcessGroup& group) {
  return group.getDeviceTypes().empty() ? std::string() : group.getGroupName();
}

// The collectives of one tensor have new names since torch 2.13, and the old ones are deprecated.

/// Writes the `input` [n] of every rank to `output` [ranks * n], in the order of the ranks. Does
/// not block the host.
inline c10::intrusive_ptr<c10d::Work> all_gather_single(
    c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options = {}) {
#if APEX_TORCH_AT_LEAST(2, 13)
  return group.all_gather_single(output, input, options);
#else
  return group._allgather_base(output, input, options);
#endif
}

/// The sizes are lengths in the first dimension, by rank; empty splits evenly. Does not block the
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

/// Tensor.grad_dtype. Overload resolution picks the second function if torch does not have it.
template <typename Tensor>
auto grad_dtype_of(const Tensor& leaf, int) -> decltype(leaf.grad_dtype()) {
  return leaf.grad_dtype();
}
template <typename Tensor>
std::optional<at::ScalarType> grad_dtype_of(const Tensor&, ...) {
  return std::nullopt;
}

/// The dtype of the gradients of a leaf, if it differs from the leaf's dtype.
inline std::optional<at::ScalarType> other_grad_dtype(const at::Tensor& leaf) {
  const std::optional<at::ScalarType> dtype = grad_dtype_of(leaf, 0);
  return dtype == leaf.scalar_type() ? std::nullopt : dtype;
}

/// Whether Backend::getBackendName() names an NCCL backend. Since torch 2.15,
/// `init_process_group("nccl")` makes a backend named "nccl2", and "nccl-lazy" is a variant of it.
/// The older backend still exists.
inline bool is_nccl(const std::string& backend_name) {
  return backend_name == "nccl" || backend_name == "nccl2" || backend_name == "nccl-lazy";
}

/// Checks that the group was not reconfigured. Since torch 2.14 a group's rank and size can change.
/// Plans and communicators from before a change are no longer valid. In earlier versions rank and
/// size never change.
/// @throws apex::Error if `group` has another rank or size than the given ones.
inline void require_same_ranks(const c10d::ProcessGroup& group, int rank, int size,
                               const char* what) {
  const int rank_now = group.getRank();
  const int size_now = group.getSize();
  if (rank_now == rank && size_now == size) return;
  throw Error("rank " + std::to_string(rank_now) + " of " + std::to_string(size_now) +
              ": the process group was reconfigured; " + what + " was created when this was rank " +
              std::to_string(rank) + " of " + std::to_string(size) +
              ". Construct a new wrapper on every rank after the group changes");
}

}  // namespace apex::parallel::detail
