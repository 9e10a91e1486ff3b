// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_layout.h"

#include <algorithm>

namespace apex::parallel {

HostLayout lay_out(const std::vector<std::string>& host_of, int rank) {
  HostLayout layout;
  std::vector<std::string> names;
  for (size_t i = 0; i < host_of.size(); ++i) {
    const auto found = std::find(names.begin(), names.end(), host_of[i]);
    const auto host = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(host_of[i]);
      layout.hosts.emplace_back();
    }
    if (static_cast<int>(i) == rank) {
      layout.host = static_cast<int>(host);
      layout.place = static_cast<int>(layout.hosts[host].size());
    }
    layout.hosts[host].push_back(static_cast<int>(i));
  }
  return layout;
}

bool HostLayout::worthwhile() const {
  return hosts.size() > 1 && hosts.front().size() > 1 &&
         std::all_of(hosts.begin(), hosts.end(),
                     [&](const auto& ranks) { return ranks.size() == hosts.front().size(); });
}

std::pair<int64_t, int64_t> equal_part(int64_t numel, int parts, int index) {
  const int64_t each = numel / parts;
  const int64_t more = numel % parts;
  const auto begin = [&](int64_t i) { return each * i + std::min(more, i); };
  return {begin(index), begin(index + 1)};
}

}  // namespace apex::parallel
