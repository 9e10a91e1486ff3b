// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>

namespace apex::parallel::detail {

/// A range in torch's profiler (and in NVTX under emit_nvtx). Costs a few nanoseconds without one.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) : function_(at::RecordScope::USER_SCOPE) {
    if (function_.isActive()) function_.before(name);
  }

 private:
  at::RecordFunction function_;
};

}  // namespace apex::parallel::detail
