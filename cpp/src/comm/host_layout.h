// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Which rank of a group is where, and who sums what, if the ranks are on several hosts. Pure.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace apex::parallel {

// Note [Columns]
//
// Hosts count in the order of their first ranks, ranks of a host in the order of the group. The
// ranks that have the same place on their hosts are a column, and there are as many columns as the
// smallest host has ranks. A message is cut into one share for each column, whose ranks carry it
// over the network. So every host has one copy of a message on the network, whatever the number of
// its ranks; ranks beyond the columns of a larger host (3 + 1 ranks: one column) have their part in
// the sums inside the host alone. One could cut shares so that every rank of every host carries
// something, but then the parts of a share would come from, and go to, several ranks of another
// host, and the network, which all ranks of a host have in common, would carry no byte less.

struct HostLayout {
  std::vector<std::vector<int>> hosts;  ///< the ranks of each
  int host = 0;                         ///< of this rank
  int place = 0;                        ///< of this rank among those of its host
  int columns = 0;

  int ranks_here() const { return static_cast<int>(hosts[host].size()); }
  bool in_column() const { return place < columns; }
  /// Every host has as many ranks.
  bool even() const;
  /// Whether summing inside the hosts first saves anything: several hosts, and not one rank each.
  bool worthwhile() const;
};

/// @param host_of  by rank: a name of its host.
HostLayout lay_out(const std::vector<std::string>& host_of, int rank);

/// The elements of part `index` of `parts` equal ones, from and to; sizes differ by one at most.
std::pair<int64_t, int64_t> equal_part(int64_t numel, int parts, int index);

}  // namespace apex::parallel
