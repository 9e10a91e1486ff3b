// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "comm/membership.h"
#include "reducer/statistics.h"

namespace apex::parallel::detail {

/// Allocates zeroed buffers in memory that the group's backend has registered (with NCCL: user
/// buffer registration), and counts them; in torch's, with a warning, where the backend has none.
/// `statistics` has to live as long.
std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)> registered_memory(
    GroupPtr group, StatisticsCounter& statistics);

}  // namespace apex::parallel::detail
