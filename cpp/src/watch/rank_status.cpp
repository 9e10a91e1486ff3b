// SPDX-License-Identifier: BSD-3-Clause
#include "watch/rank_status.h"

#include <algorithm>
#include <iomanip>
#include <locale>
#include <sstream>

#include "plain_text.h"

namespace apex::parallel {

std::string RankStatus::encode() const {
  PlainText out;
  out << std::quoted(what) << ' ' << proof.size();
  for (const auto& [rank, state] : proof) out << ' ' << rank << ' ' << std::quoted(state);
  return out.str();
}

RankStatus RankStatus::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  RankStatus status;
  size_t proofs = 0;
  in >> std::quoted(status.what) >> proofs;
  for (int rank = 0; proofs > 0 && in >> rank; --proofs) in >> std::quoted(status.proof[rank]);
  return status;
}

std::string list_of(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return ranks.size() > kMost ? text + " and " + std::to_string(ranks.size() - kMost) + " more"
                              : text;
}

Findings find(const RankStatuses& statuses, int rank) {
  Findings findings;
  for (const auto& [other, status] : statuses) {
    if (other == rank) continue;
    findings.reports.emplace(other, status.what);
    findings.proof.insert(status.proof.begin(), status.proof.end());
  }
  for (const auto& [other, what] : findings.reports) findings.proof.erase(other);
  findings.proof.erase(rank);  // it was stopped, and continues
  return findings;
}

}  // namespace apex::parallel
