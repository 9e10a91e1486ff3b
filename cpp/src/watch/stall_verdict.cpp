// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "watch/record.h"

namespace apex::parallel {

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

/// Whether `rank` waits in a collective, as far as is known.
bool waits(const Stall& stall, int rank) {
  const auto found = stall.others.find(rank);
  return found != stall.others.end() && found->second.waits && stall.processes.count(rank) == 0;
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
  const auto found = stall.others.find(rank);
  // A waiting rank is not expected to answer again; when it stops waiting, it corrects its report.
  if (found == stall.others.end() ||
      (!found->second.waits && found->second.asked < stall.mine.asked)) {
    return {who + " does not answer",
            "it cannot reach the store, its host is down or does not schedule it, or it has not "
            "used the group yet",
            "check that its process is running and its host can be reached"};
  }
  const RankRecord& other = found->second;
  std::string where = who;
  if (other.waits) {
    where += " waits in another collective, for " + seconds_of(other.seconds) + ": " + other.what;
    return {where + indented(other.state),
            other.channel == stall.mine.channel
                ? "the ranks are at different points of the program: one has skipped or repeated a "
                  "step, a layer or a call"
                : "it waits for other ranks in another group, which may wait for this one",
            "compare the last calls of the ranks; every rank must make the same calls of a group "
            "in the same order"};
  }
  where += " is in no collective";
  if (!other.what.empty())
    where +=
        "; its last began " + seconds_of(other.seconds) + " before it was asked: " + other.what;
  return {
      where + indented(other.state),
      "it is busy with its own work (loading data, evaluation or a checkpoint on one rank; in "
      "backward a layer or a hook), or it has left the training loop",
      "check the stack above; work that only one rank does must be shorter than the timeout, and "
      "ranks with fewer batches need join()"};
}

}  // namespace

std::vector<int> late(const Stall& stall) {
  std::vector<int> elsewhere, in_no_collective;
  int64_t fewest = stall.mine.call;
  for (int rank = 0; rank < stall.size; ++rank) {
    if (rank == stall.rank) continue;
    const bool lost = stall.processes.count(rank) != 0;
    if (!stall.store_answers) {
      if (lost) in_no_collective.push_back(rank);
    } else if (stall.on_device) {
      if (lost || reached(stall, rank) < stall.mine.call) in_no_collective.push_back(rank);
    } else if (!waits(stall, rank)) {
      in_no_collective.push_back(rank);
    } else if (stall.others.at(rank).channel != stall.mine.channel ||
               stall.others.at(rank).call != stall.mine.call) {
      elsewhere.push_back(rank);
      fewest = std::min(fewest, reached(stall, rank));
    }
  }
  if (!in_no_collective.empty()) return in_no_collective;
  if (fewest == stall.mine.call) return elsewhere;
  std::vector<int> behind;
  for (const int rank : elsewhere) {
    if (reached(stall, rank) == fewest) behind.push_back(rank);
  }
  return behind;
}

bool is_stall(const Stall& stall) { return !stall.on_device || !late(stall).empty(); }

std::string describe(const Stall& stall) {
  std::string text = (stall.on_device ? "the GPU of rank " : "rank ") + std::to_string(stall.rank) +
                     " of " + std::to_string(stall.size) + " has waited for " +
                     seconds_of(stall.mine.seconds) + " in: " + stall.mine.what;
  if (!stall.store_answers && stall.processes.empty()) {
    return text +
           "\n  who:   unknown: the store, through which ranks report, does not answer"
           "\n  why:   its process (rank 0 or the launcher) has ended, is stopped or unreachable, "
           "or it "
           "is no TCPStore"
           "\n  next:  check that this process is running and its host can be reached; a group "
           "that "
           "was made with file:// has no reports";
  }
  const std::vector<int> late = parallel::late(stall);
  if (late.empty()) {
    return text +
           "\n  who:   no rank is late: all ranks wait in this collective"
           "\n  why:   the network is slow or broken, or a rank is slow to compute its part"
           "\n  next:  check the load of the hosts and their network" +
           indented(stall.mine.state);
  }
  std::vector<int> waiting;
  for (int rank = 0; rank < stall.size && stall.store_answers; ++rank) {
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
