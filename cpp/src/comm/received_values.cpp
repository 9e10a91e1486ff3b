// SPDX-License-Identifier: BSD-3-Clause
#include "comm/received_values.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "floating_point_mode.h"

namespace apex::parallel {

namespace {

/// Up to this number of elements, operators start no other threads, which would compute in their
/// own floating-point mode.
constexpr int64_t kOneThread = 32768;

}  // namespace

void change_received(const at::Tensor& tensor,
                     const std::function<void(const at::Tensor& part)>& change) {
  if (!tensor.is_cpu()) return change(tensor);
  if (tensor.layout() == at::kSparse) return change_received(tensor._values(), change);
  const DefaultFloatingPointMode mode;
  if (tensor.numel() <= kOneThread || !tensor.is_non_overlapping_and_dense()) return change(tensor);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  for (int64_t begin = 0; begin < flat.numel(); begin += kOneThread)
    change(flat.narrow(0, begin, std::min(kOneThread, flat.numel() - begin)));
}

void scale_in_place(const at::Tensor& tensor, double factor) {
  tensor.mul_(at::native::wrapped_scalar_tensor(factor));  // as the right operand it stays a double
}

}  // namespace apex::parallel
