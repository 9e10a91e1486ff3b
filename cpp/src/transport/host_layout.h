// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Which ranks of a group are on which host. Pure.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace apex::parallel {

/// Hosts are ordered by their first ranks, and the ranks of a host by the order of the group.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  ///< the ranks of each host
  int host = 0;                         ///< this rank's host
  int place = 0;                        ///< this rank's position on its host

  /// The number of ranks of a host.
  int places() const { return static_cast<int>(hosts[static_cast<size_t>(host)].size()); }
  /// Whether sums inside the hosts first save traffic: several hosts with the same number of ranks,
  /// which is not one.
  bool worthwhile() const;
};

/// @param host_of  host name of each rank.
HostLayout lay_out(const std::vector<std::string>& host_of, int rank);

/// First and last + 1 element of part `index` of `parts`; sizes differ by at most one.
std::pair<int64_t, int64_t> equal_part(int64_t numel, int parts, int index);

}  // namespace apex::parallel
