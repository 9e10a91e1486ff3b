// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "comm/membership.h"
#include "reducer/statistics.h"

namespace apex::parallel::detail {

/// An allocator of zeroed buffers in memory of the group's backend (user buffer registration with
/// NCCL, shared memory on the CPU). It counts the buffers. If the backend has no such memory, it
/// warns and uses torch's allocator. `statistics` must outlive the result.
std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)> registered_memory(
    GroupPtr group, StatisticsCounter& statistics);

}  // namespace apex::parallel::detail
