// SPDX-License-Identifier: BSD-3-Clause
#include "watch/record.h"

#include <algorithm>
#include <cmath>
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
  out << ' ' << std::quoted(state) << ' ' << std::quoted(failure) << ' ' << std::quoted(cause)
      << ' ' << proof.size();
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
  in >> std::quoted(read.state) >> std::quoted(read.failure) >> std::quoted(read.cause) >> proofs;
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
    findings.reports.emplace(other, record);
    findings.proof.insert(record.proof.begin(), record.proof.end());
  }
  for (const auto& [other, record] : findings.reports) findings.proof.erase(other);
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

// --- the report about a stall ---

namespace {

/// Maximum number of ranks that are described; the rest is only counted.
constexpr size_t kMost = 4;

std::string seconds_of(double seconds) {
  return std::to_string(static_cast<int64_t>(std::lround(seconds))) + " s";
}

std::string indented(const std::string& lines) {
  std::istringstream in(lines);
  std::string text, line;
  while (std::getline(in, line)) {
    if (!line.empty()) text += "\n      " + line;
  }
  return text;
}

/// The number of the last call of `rank` in the channel in which this rank waits.
int64_t reached(const Stall& stall, int rank) {
  const auto found = stall.others.find(rank);
  if (found == stall.others.end()) return 0;
  const auto log = found->second.calls.find(stall.mine.channel);
  return log == found->second.calls.end() ? 0 : log->second.number;
}

/// The answer of `rank`, if it has answered.
const RankRecord* answer_of(const Stall& stall, int rank) {
  const auto found = stall.others.find(rank);
  const bool answered = found != stall.others.end() && found->second.asked >= stall.mine.asked;
  return answered ? &found->second : nullptr;
}

struct Cause {
  std::string where, why, next;
};

Cause cause_of(const Stall& stall, int rank) {
  const std::string who = "rank " + std::to_string(rank);
  const auto process = stall.processes.find(rank);
  if (process != stall.processes.end()) {
    const bool ended = process->second.find("ended") != std::string::npos;
    return {who + " " + process->second,
            ended ? "its process has ended, but its connections have not been closed"
                  : "a signal or a debugger has stopped it, and it has not been continued",
            ended ? "check the end of its output, and restart the job"
                  : "continue it (kill -CONT), or detach the debugger"};
  }
  const RankRecord* const other = answer_of(stall, rank);
  if (other == nullptr) {
    return {who + " does not answer",
            "it cannot reach the store, its host is down or does not schedule it, or it has not "
            "used the group yet",
            "check that its process is running and its host can be reached"};
  }
  if (other->waits) {
    return {
        who + " waits in another collective, for " + seconds_of(other->seconds) + ": " +
            other->what + indented(other->state),
        other->channel == stall.mine.channel
            ? "the ranks are at different points of the program: one has skipped or repeated a "
              "step, a layer or a call"
            : "it waits for other ranks in another group; if they wait for this one, a rank has "
              "skipped or repeated a step, a layer or a call",
        "compare the last calls of the ranks; every rank must make the same calls of a group "
        "in the same order"};
  }
  std::string where = who + " is in no collective of this group";
  if (!other->what.empty())
    where += "; its last one began " + seconds_of(other->seconds) +
             " before it answered: " + other->what;
  return {where + indented(other->state),
          "it is busy with its own work (loading data, evaluation or a checkpoint on one rank; in "
          "backward a layer or a hook) or in a collective of another group, or it has left the "
          "training loop",
          "check what it does; work that only one rank does must be shorter than the timeout, and "
          "ranks need as many batches as the others, or join()"};
}

}  // namespace

bool waits_too(const Stall& stall, int rank) {
  if (stall.processes.count(rank) != 0) return false;
  if (stall.on_device) return reached(stall, rank) >= stall.mine.call;
  const RankRecord* const other = answer_of(stall, rank);
  return other != nullptr && other->waits && other->channel == stall.mine.channel &&
         other->call == stall.mine.call;
}

std::vector<int> late(const Stall& stall) {
  std::vector<int> elsewhere, in_no_collective;
  int64_t fewest = stall.mine.call;
  for (int rank = 0; rank < stall.size; ++rank) {
    if (rank == stall.rank || waits_too(stall, rank)) continue;
    const RankRecord* const other = answer_of(stall, rank);
    if (stall.on_device || other == nullptr || !other->waits || stall.processes.count(rank) != 0) {
      in_no_collective.push_back(rank);
    } else {
      elsewhere.push_back(rank);
      fewest = std::min(fewest, reached(stall, rank));
    }
  }
  if (!in_no_collective.empty()) return in_no_collective;
  const auto is_ahead = [&](int rank) { return reached(stall, rank) > fewest; };
  if (fewest < stall.mine.call)
    elsewhere.erase(std::remove_if(elsewhere.begin(), elsewhere.end(), is_ahead), elsewhere.end());
  return elsewhere;
}

std::string describe(const Stall& stall) {
  std::string text = (stall.on_device ? "the GPU of " : "") + rank_of(stall.rank, stall.size) +
                     " has waited for " + seconds_of(stall.mine.seconds) +
                     " in: " + stall.mine.what;
  const std::vector<int> late = parallel::late(stall);
  if (late.empty()) {
    return text +
           "\n  who:   no rank is late: all ranks wait in this collective"
           "\n  why:   the network is slow or broken, or a rank is slow to compute its part"
           "\n  next:  check the load of the hosts and their network" +
           indented(stall.mine.state);
  }
  std::vector<int> waiting;
  for (int rank = 0; rank < stall.size; ++rank) {
    if (rank != stall.rank && std::find(late.begin(), late.end(), rank) == late.end())
      waiting.push_back(rank);
  }
  text += "\n  who:   " + list_of(late) + (late.size() == 1 ? " holds" : " hold") + " it up";
  if (!waiting.empty())
    text += "; " + list_of(waiting) + (waiting.size() == 1 ? " waits" : " wait") + " as well";
  std::string before;
  for (size_t i = 0; i < std::min(late.size(), kMost); ++i) {
    const Cause cause = cause_of(stall, late[i]);
    text += "\n  where: " + cause.where;
    if (cause.why == before) continue;  // same cause as the rank above
    before = cause.why;
    text += "\n  why:   " + cause.why + "\n  next:  " + cause.next;
  }
  if (stall.seconds_left >= 0)
    text += "\n  The waiting ranks fail in " + seconds_of(stall.seconds_left) +
            ", at the group's timeout.";
  return stall.note.empty() ? text : text + "\n  (" + stall.note.substr(2) + ")";
}

}  // namespace apex::parallel
