// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "batch_norm/sync_batch_norm_common.h"

/// Batch norm on CUDA by ATen's own operators (batch_norm_stats and the others that torch's
/// SyncBatchNorm calls), and the choice between them and the kernels. They are slower than the
/// kernels and round the statistics to float32, but exchange the same: ranks may choose
/// differently.

namespace apex::parallel::detail {

/// What the operators of a device compute with, once their arguments are checked. There is at least
/// one channel.
struct Implementation {
  ForwardResult (*forward)(const ForwardArguments& a, const ForwardCall& call);
  at::Tensor (*inference)(const InferenceArguments& a, const InferenceCall& call);
  BackwardResult (*backward)(const BackwardArguments& a, const BackwardCall& call);
};

extern const Implementation kAten;

/// `kernels` or kAten, whichever is to be used for tensors like `x`. The environment variable
/// APEX_SYNC_BATCH_NORM decides ("apex" or "aten"). If it is not set, the first call for each
/// device and dtype compares both on a small input, which blocks the host, and chooses kAten with a
/// warning if they differ by more than rounding or a launch fails. While `capturing` nothing is
/// compared. Thread safe.
/// @throws ValueError for another value of the variable.
const Implementation& choose(const Implementation& kernels, const at::Tensor& x, bool capturing);

/// What was chosen is chosen again. For tests.
void forget_choices();

}  // namespace apex::parallel::detail
