// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Large all-gathers over Gloo, in slices.

#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace apex::parallel {

// Note [Messages in both directions]
//
// Between two ranks, Gloo has one connection with one queue per direction. A message is sent once
// its receiver has announced, in that queue, that it receives it. If the other rank is later by
// more than a round trip, its announcement arrives first; then the whole message of this rank goes
// into the queue before this rank's own announcement, and the other rank's message follows it
// instead of crossing it. An exchange of 23 MB each way over 1 Gbit/s takes 380 instead of 195 ms.
// In slices, announcements wait for a slice at most.

/// An all-gather larger than this is issued in slices of this size per rank. For
/// collectives that Gloo runs; `issue` issues one slice and returns a Work with a future.
inline constexpr int64_t kSliceBytes = int64_t{1} << 20;

/// @param gathered, share  contiguous, on the CPU; `share` has the same size on all ranks.
c10::intrusive_ptr<c10d::Work> all_gather_in_slices(
    const at::Tensor& gathered, const at::Tensor& share,
    const std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor& gathered, at::Tensor& share)>&
        issue);

}  // namespace apex::parallel
