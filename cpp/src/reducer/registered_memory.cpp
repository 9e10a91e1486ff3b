// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/registered_memory.h"

#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "torch_version.h"

namespace apex::parallel::detail {

namespace {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

at::Tensor allocate(const GroupPtr& group, StatisticsCounter& statistics, int64_t numel,
                    const at::TensorOptions& options) {
  const at::Device device = options.device();
  std::string reason = "the group has no backend for " + device.str();
  if (has_backend(*group, device.type())) {
    const auto backend = group->getBackend(device.type());
    try {
      if (backend->supportsTensorAlloc(device.index())) {
        at::Tensor buffer = backend->allocateTensor(static_cast<long>(numel), options);
        statistics.add(&ReducerStatistics::buffers_registered);
        // Memory of a HostBackend is already zeroed, and a write would allocate its pages.
        return device.is_cpu() ? buffer : buffer.zero_();
      }
      reason = backend->getBackendName() + " does not allocate memory on this device";
    } catch (const std::exception& error) {
      reason = backend->getBackendName() + " could not allocate it: " + first_line(error.what());
    }
  }
  TORCH_WARN_ONCE("registered_buffers: buckets are allocated by torch instead, since ", reason);
  return at::zeros({numel}, options);
}

}  // namespace

std::function<at::Tensor(int64_t, const at::TensorOptions&)> registered_memory(
    GroupPtr group, StatisticsCounter& statistics) {
  return [group = std::move(group), &statistics](int64_t numel, const at::TensorOptions& options) {
    return allocate(group, statistics, numel, options);
  };
}

}  // namespace apex::parallel::detail
