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
  out << failure.has_value() << ' ' << hook.has_value();
  if (failure) {
    out << ' ' << std::quoted(failure->what) << ' ' << failure->proof.size();
    for (const auto& [rank, state] : failure->proof)
      out << ' ' << rank << ' ' << std::quoted(state);
  }
  if (hook)
    out << ' ' << hook->generation << ' ' << hook->position << ' ' << hook->begun << ' '
        << std::quoted(hook->what) << ' ' << std::quoted(hook->cause);
  return out.str();
}

RankStatus RankStatus::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  RankStatus status;
  bool failed = false, in_hook = false;
  in >> failed >> in_hook;
  if (failed) {
    Failure& failure = status.failure.emplace();
    size_t proofs = 0;
    in >> std::quoted(failure.what) >> proofs;
    for (int rank = 0; proofs > 0 && in >> rank; --proofs) in >> std::quoted(failure.proof[rank]);
  }
  if (in_hook) {
    Hook& hook = status.hook.emplace();
    in >> hook.generation >> hook.position >> hook.begun >> std::quoted(hook.what) >>
        std::quoted(hook.cause);
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
  const RankStatus::Hook* first = nullptr;
  int culprit = 0;
  for (const auto& [author, status] : statuses) {
    if (status.failure) verdict.kind = Verdict::kFailed;
  }
  // A rank that learns of a failed hook also reports a failure; the hook is the cause.
  const int64_t here = 2 * at.call + (at.in_hook ? 1 : 0);
  for (const auto& [author, status] : statuses) {
    const auto& hook = status.hook;
    if (author.second != at.group || !hook || hook->generation != at.generation) continue;
    // A hook that has begun its collective may have failed because another rank is lost.
    if (hook->begun || (hook->position >= here && verdict.kind == Verdict::kOk)) continue;
    if (first != nullptr && hook->position >= first->position) continue;
    first = &*hook;
    culprit = author.first;
  }
  if (first == nullptr || culprit == at.rank) return verdict;
  return {Verdict::kHook, "rank " + std::to_string(culprit) + " reports that " + first->what +
                              " failed there: " + first->cause};
}

std::optional<bool> hooks_alike(const RankStatuses& statuses, const Position& at) {
  int alike = 0;
  const auto mine = statuses.find({at.rank, at.group});
  if (mine == statuses.end() || !mine->second.hook ||
      mine->second.hook->generation != at.generation)
    return std::nullopt;  // this rank's own post is not in the copy yet
  // A rank with a newer hook failure has continued after this one, which it does only if all hooks
  // failed alike.
  for (const auto& [author, status] : statuses) {
    if (author.second == at.group && status.hook && status.hook->generation > at.generation)
      return true;
  }
  for (const auto& [author, status] : statuses) {
    if (status.failure) return false;
    if (author.second != at.group || !status.hook || status.hook->generation != at.generation)
      continue;
    // Ignores `begun`: the same error occurs before the collective on a rank whose future completes
    // at once, and after it on another rank.
    if (status.hook->position != mine->second.hook->position ||
        status.hook->what != mine->second.hook->what)
      return false;
    ++alike;
  }
  return alike == at.size ? std::optional<bool>(true) : std::nullopt;
}

Findings find(const RankStatuses& statuses, int rank) {
  Findings findings;
  for (const auto& [author, status] : statuses) {
    const auto& failure = status.failure;
    if (author.first == rank || !failure) continue;
    findings.reports.emplace(author.first, failure->what);
    findings.proof.insert(failure->proof.begin(), failure->proof.end());
  }
  for (const auto& [other, what] : findings.reports) findings.proof.erase(other);
  findings.proof.erase(rank);  // it was stopped, and continues
  return findings;
}

}  // namespace apex::parallel
