// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Assigns ranks to hosts, and shares of a message to ranks, for groups on several hosts. Pure.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace apex::parallel {

// Note [Columns]
//
// Hosts are ordered by their first ranks, and the ranks of a host by the order of the group. The
// ranks with the same position on their hosts form a column. The number of columns is the number of
// ranks of the smallest host. A message is cut into one share per column, and the column's ranks
// send it over the network. So every host sends one copy of a message, regardless of its number of
// ranks. Ranks of a larger host outside the columns (3 + 1 ranks: one column) only take part in the
// sums inside the host. Shares could be cut so that every rank of every host sends something. But
// then a share would be exchanged with several ranks of another host, and the network, which all
// ranks of a host share, would carry the same number of bytes.

struct HostLayout {
  std::vector<std::vector<int>> hosts;  ///< the ranks of each host
  int host = 0;                         ///< this rank's host
  int place = 0;                        ///< this rank's position on its host
  int columns = 0;

  bool in_column() const { return place < columns; }
  /// Whether every host has the same number of ranks.
  bool even() const;
  /// Whether summing inside hosts first saves traffic: several hosts, and not one rank each.
  bool worthwhile() const;
};

/// @param host_of  host name of each rank.
HostLayout lay_out(const std::vector<std::string>& host_of, int rank);

/// First and last + 1 element of part `index` of `parts`; sizes differ by at most one.
std::pair<int64_t, int64_t> equal_part(int64_t numel, int parts, int index);

}  // namespace apex::parallel
