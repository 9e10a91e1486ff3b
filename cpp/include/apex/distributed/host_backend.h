// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::distributed {

/// Adds the c10d backend "apex" for CPU tensors to `group`. It runs collectives over shared memory
/// between the ranks of a host, and over Gloo otherwise. init_process_group("apex") does the same;
/// this function is for programs that create their process groups themselves:
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
/// Sums are in rank order, so every rank has the same bits. A collective makes progress while a
/// rank waits for it or polls it. After a call of Work::getFuture(), a thread makes that progress
/// instead.
///
/// Collective over the ranks of `group`. No other group may use the keys of its store. Blocks until
/// all ranks have connected. Thread safe.
///
/// @param timeout       for connecting, and for each collective.
/// @param name          name of the group in errors.
/// @param global_ranks  the job's rank of each rank of the group, for errors; empty: they are
///                      equal.
/// @throws apex::InvalidArgument if `group` has no store, or `timeout` is not positive.
/// @throws apex::CommunicationError if a rank does not connect within the timeout.
APEX_API void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               std::chrono::milliseconds timeout, const std::string& name = "",
                               const std::vector<uint64_t>& global_ranks = {});

}  // namespace apex::distributed
