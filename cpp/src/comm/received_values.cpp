// SPDX-License-Identifier: BSD-3-Clause
#include "comm/received_values.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "floating_point_mode.h"

namespace apex::parallel {

namespace {

/// Fewer elements are not worth another thread.
constexpr int64_t kGrain = 32768;

}  // namespace

void change_received(const at::Tensor& tensor,
                     const std::function<void(const at::Tensor& part)>& change) {
  if (!tensor.is_cpu()) return change(tensor);
  if (tensor.layout() == at::kSparse) return change_received(tensor._values(), change);
  const DefaultFloatingPointMode mode;
  const bool one_thread =
      tensor.numel() <= kGrain || at::get_num_threads() == 1 || at::in_parallel_region();
  if (one_thread || !tensor.is_non_overlapping_and_dense()) return change(tensor);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  // An operator would start these threads itself, and they would compute in their own mode.
  at::parallel_for(0, flat.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const DefaultFloatingPointMode mode_of_thread;
    const at::AutoDispatchBelowADInplaceOrView below_autograd_of_thread;
    change(flat.narrow(0, begin, end - begin));
  });
}

}  // namespace apex::parallel
