// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "batch_norm/sync_batch_norm_common.h"

/// Batch norm on CUDA with ATen's operators (batch_norm_stats and the others that torch's
/// SyncBatchNorm calls), and the choice between them and this library's kernels. ATen's operators
/// are slower and round the statistics to float32. Both exchange the same messages, so ranks may
/// choose differently.

namespace apex::parallel::detail {

/// The functions that implement the operators of a device. Their arguments are checked, and have at
/// least one channel.
struct Implementation {
  ForwardResult (*forward)(const ForwardArguments& a, const ForwardCall& call);
  at::Tensor (*inference)(const InferenceArguments& a, const InferenceCall& call);
  BackwardResult (*backward)(const BackwardArguments& a, const BackwardCall& call);
};

extern const Implementation kAten;

/// Returns `kernels` or kAten for tensors like `x`. The environment variable APEX_SYNC_BATCH_NORM
/// ("apex" or "aten") selects one. If it is not set, the first call for each device and dtype
/// compares both on small inputs, which blocks the host. It chooses kAten, with a warning, if the
/// results differ by more than rounding or a launch fails. While `capturing` it compares nothing.
/// Thread safe.
/// @throws ValueError for another value of the variable.
const Implementation& choose(const Implementation& kernels, const at::Tensor& x, bool capturing);

/// Forgets all choices, so that the next call chooses again. For tests.
void forget_choices();

}  // namespace apex::parallel::detail
