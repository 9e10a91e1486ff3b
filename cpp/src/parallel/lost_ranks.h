#pragma once

#include <cstdint>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace apex::parallel {

/// After a collective of `group` failed: tells the other ranks so through the group's store, and
/// collects for a few seconds who else reports a failure. Returns what to add to the error: the ranks
/// that did not, hence have stopped or never came, and those that failed in another step. If the store
/// ends meanwhile, with the rank that keeps it: what was known until then. Empty without a store. Blocks
/// the host for at most five seconds (seven on rank 0); never throws.
///
/// @param step  which synchronized backward this is, from 1.
std::string describe_lost_ranks(const c10d::ProcessGroup& group, int64_t step) noexcept;

}  // namespace apex::parallel
