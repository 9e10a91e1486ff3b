// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "comm/membership.h"
#include "reducer/statistics.h"

namespace apex::parallel::detail {

/// Allocates zeroed buffers in memory of the group's backend (with NCCL: user buffer registration;
/// on the CPU: shared memory), and counts them; in torch's, with a warning, where it has none.
/// `statistics` has to live as long.
std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)> registered_memory(
    GroupPtr group, StatisticsCounter& statistics);

}  // namespace apex::parallel::detail
