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
  out << failure.has_value();
  if (failure) {
    out << ' ' << std::quoted(failure->what) << ' ' << failure->over << ' '
        << failure->refused.size();
    for (const int64_t call : failure->refused) out << ' ' << call;
    out << ' ' << failure->proof.size();
    for (const auto& [rank, state] : failure->proof)
      out << ' ' << rank << ' ' << std::quoted(state);
  }
  return out.str();
}

RankStatus RankStatus::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  RankStatus status;
  bool failed = false;
  in >> failed;
  if (failed) {
    Failure& failure = status.failure.emplace();
    size_t refused = 0, proofs = 0;
    in >> std::quoted(failure.what) >> failure.over >> refused;
    for (int64_t call = 0; refused > 0 && in >> call; --refused) failure.refused.push_back(call);
    in >> proofs;
    for (int rank = 0; proofs > 0 && in >> rank; --proofs) in >> std::quoted(failure.proof[rank]);
  }
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

Verdict judge(const RankStatuses& statuses, const Position& at) {
  Verdict verdict;
  // If this rank has refused the call as well, it does not wait in it.
  const auto own = statuses.find({at.rank, at.group});
  const auto passed_over = [&](int64_t call) {
    if (own == statuses.end() || !own->second.failure) return false;
    const auto& mine = own->second.failure->refused;
    return std::find(mine.begin(), mine.end(), call) != mine.end();
  };
  for (const auto& [author, status] : statuses) {
    const std::string& group = author.second;
    const auto& failure = status.failure;
    if (!failure || (group != at.group && group != at.parent)) continue;
    const auto& refused = failure->refused;
    const auto holds_up = [&](int64_t call) {
      return (at.or_before ? call <= at.call : call == at.call) && !passed_over(call);
    };
    if (refused.empty() ||
        (group == at.group && std::any_of(refused.begin(), refused.end(), holds_up)))
      verdict.kind = Verdict::kFailed;
  }
  return verdict;
}

Findings find(const RankStatuses& statuses, const Position& at, const ReportKeys& old) {
  Findings findings;
  for (const bool own : {true, false}) {  // reports about this group come first
    for (const auto& [author, status] : statuses) {
      const auto& [rank, group] = author;
      const auto& failure = status.failure;
      if (rank == at.rank || !failure || (group == at.group) != own) continue;
      if (!own && old.count(author) != 0) continue;
      if (failure->over && (!own || !failure->refused.empty())) continue;
      findings.reports.emplace(rank, failure->what);
      findings.proof.insert(failure->proof.begin(), failure->proof.end());
    }
  }
  for (const auto& [rank, what] : findings.reports) findings.proof.erase(rank);
  findings.proof.erase(at.rank);  // it was stopped, and continues
  return findings;
}

}  // namespace apex::parallel
