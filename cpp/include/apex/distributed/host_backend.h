// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::distributed {

/// Gives `group` the c10d backend "apex" for CPU tensors: collectives over memory that the ranks of
/// a host share, and Gloo for everything else. What init_process_group("apex") does, for programs
/// that make their process groups on their own:
///
///     #include <torch/csrc/distributed/c10d/TCPStore.hpp>
///     #include <apex/distributed/host_backend.h>
///
///     const auto store = c10::make_intrusive<c10d::TCPStore>("host-of-rank-0");
///     auto group = c10::make_intrusive<c10d::ProcessGroup>(store, /*rank=*/0, /*size=*/2);
///     apex::distributed::add_host_backend(group, std::chrono::minutes(5));
///     std::vector<at::Tensor> tensors{at::ones({1000})};
///     group->allreduce(tensors)->wait();
///
/// Sums are in the order of the ranks, so every rank has the same bits. A collective makes progress
/// while a rank waits for it or asks whether it has completed; once a program asks for the future
/// of one, a thread does so.
///
/// Collective over the ranks of `group`, whose store has keys of no other group; blocks until all
/// of them have connected. Thread safe.
///
/// @param timeout       for connecting, and for each collective.
/// @param name          of the group, in errors.
/// @param global_ranks  of its ranks in the job, for errors; empty: the same.
/// @throws apex::InvalidArgument if `group` has no store, or `timeout` is not positive.
/// @throws apex::CommunicationError if a rank does not come within the timeout.
APEX_API void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               std::chrono::milliseconds timeout, const std::string& name = "",
                               const std::vector<uint64_t>& global_ranks = {});

}  // namespace apex::distributed
