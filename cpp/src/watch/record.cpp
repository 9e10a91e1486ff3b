// SPDX-License-Identifier: BSD-3-Clause
#include "watch/record.h"

#include <algorithm>
#include <iomanip>
#include <locale>
#include <sstream>

#include "error_text.h"
#include "plain_text.h"

namespace apex::parallel {

void CallLog::add(const std::string& what) {
  ++number;
  names.push_back(what);
  if (names.size() > kKept) names.pop_front();
}

std::string CallLog::name_of(int64_t at) const {
  const int64_t first = number - static_cast<int64_t>(names.size()) + 1;
  return at < first || at > number ? std::string() : names[static_cast<size_t>(at - first)];
}

std::string RankRecord::encode() const {
  PlainText out;
  out << std::quoted(channel) << ' ' << call << ' ' << std::quoted(what) << ' ' << waits << ' '
      << seconds << ' ' << asked << ' ' << calls.size();
  for (const auto& [name, log] : calls) {
    out << ' ' << std::quoted(name) << ' ' << log.number << ' ' << log.names.size();
    for (const std::string& one : log.names) out << ' ' << std::quoted(in_common(one));
  }
  out << ' ' << std::quoted(state) << ' ' << std::quoted(failure) << ' ' << proof.size();
  for (const auto& [rank, fate] : proof) out << ' ' << rank << ' ' << std::quoted(fate);
  return out.str();
}

RankRecord RankRecord::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  RankRecord read;
  size_t channels = 0, names = 0, proofs = 0;
  in >> std::quoted(read.channel) >> read.call >> std::quoted(read.what) >> read.waits >>
      read.seconds >> read.asked >> channels;
  for (std::string name; channels > 0 && in >> std::quoted(name); --channels) {
    CallLog& log = read.calls[name];
    in >> log.number >> names;
    for (std::string one; names > 0 && in >> std::quoted(one); --names) log.names.push_back(one);
  }
  in >> std::quoted(read.state) >> std::quoted(read.failure) >> proofs;
  for (int rank = 0; proofs > 0 && in >> rank; --proofs) in >> std::quoted(read.proof[rank]);
  return read;
}

std::string list_of(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return ranks.size() > kMost ? text + " and " + std::to_string(ranks.size() - kMost) + " more"
                              : text;
}

Findings dead(const RankRecords& records, int rank) {
  Findings findings;
  for (const auto& [other, record] : records) {
    if (other == rank || record.failure.empty()) continue;
    findings.reports.emplace(other, record.failure);
    findings.proof.insert(record.proof.begin(), record.proof.end());
  }
  for (const auto& [other, what] : findings.reports) findings.proof.erase(other);
  findings.proof.erase(rank);  // it was stopped, and continues
  return findings;
}

std::string apart(int rank, const RankRecord& mine, int other, const RankRecord& theirs) {
  const auto is_in = [](const CallLog& log, int64_t from, const std::string& name) {
    for (; from <= log.number; ++from) {
      if (in_common(log.name_of(from)) == name) return true;
    }
    return false;
  };
  for (const auto& [channel, calls] : mine.calls) {
    const auto found = theirs.calls.find(channel);
    if (found == theirs.calls.end()) continue;
    const int64_t last = std::min(calls.number, found->second.number);
    for (int64_t at = std::max<int64_t>(1, last - int64_t{CallLog::kKept} + 1); at <= last; ++at) {
      const std::string here = in_common(calls.name_of(at));
      const std::string there = in_common(found->second.name_of(at));
      if (here.empty() || there.empty() || here == there) continue;
      if (is_in(found->second, at, here) || is_in(calls, at, there)) break;
      return "rank " + std::to_string(rank) + " is in: " + calls.name_of(at) + ", while rank " +
             std::to_string(other) + " is in: " + there;
    }
  }
  return {};
}

}  // namespace apex::parallel
