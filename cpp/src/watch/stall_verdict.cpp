// SPDX-License-Identifier: BSD-3-Clause
#include "watch/stall_verdict.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>
#include <vector>

#include "plain_text.h"

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

/// Whether `other` has reached the call in which this rank waits.
bool has_come(const Stall& stall, const Whereabouts& other) {
  const Whereabouts& mine = stall.mine;
  if (!stall.on_device) return other.waits && other.group == mine.group && other.call == mine.call;
  const auto reached = other.reached.find(mine.group);
  return reached != other.reached.end() && reached->second >= mine.call;
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
  // A waiting rank is not expected to answer again; when it stops waiting, it corrects its post.
  if (found == stall.others.end() ||
      (!found->second.waits && found->second.asked < stall.mine.asked)) {
    return {who + " does not answer",
            "it cannot reach the store, its host is down or does not schedule it, it has not used "
            "the group yet, or its APEX_STALL_SECONDS is longer",
            "check that its process is running and its host can be reached"};
  }
  const Whereabouts& other = found->second;
  std::string where = who;
  if (other.waits) {
    where += " waits in another collective, for " + seconds_of(other.seconds) + ": " + other.what;
    return {where + indented(other.state),
            other.group == stall.mine.group
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

/// The gradient that a backward waits for. A stack trace changes all the time and is not always
/// available.
std::string place_in_backward(const std::string& lines) {
  std::istringstream in(lines);
  std::string text, line;
  while (std::getline(in, line)) {
    if (line.rfind("backward number", 0) == 0) text += line + '\n';
  }
  return text;
}

struct Ranks {
  std::vector<int> late, waiting;
};

/// Whether another rank of `late` has not reached the call in which `rank` waits, in this group or
/// another. In a broadcast, for example, some ranks leave early and go on to the next collective,
/// while others still wait for a rank that forwards the data.
bool is_held_up(const Stall& stall, int rank, const std::vector<int>& late) {
  const auto found = stall.others.find(rank);
  if (stall.on_device || stall.processes.count(rank) != 0 || found == stall.others.end() ||
      !found->second.waits) {
    return false;
  }
  const bool here = found->second.group == stall.mine.group;
  const int64_t call = here ? std::min(found->second.call, stall.mine.call) : found->second.call;
  return std::any_of(late.begin(), late.end(), [&](int other) {
    if (other == rank) return false;
    if (stall.processes.count(other) != 0) return true;
    const auto its = stall.others.find(other);
    if (its == stall.others.end()) return here;
    if (its->second.waits) return false;
    if (its->second.asked < stall.mine.asked) return here;
    const auto reached = its->second.reached.find(found->second.group);
    return reached == its->second.reached.end() ? here : reached->second < call;
  });
}

Ranks sorted(const Stall& stall) {
  Ranks ranks;
  for (int rank = 0; rank < stall.size; ++rank) {
    if (rank == stall.rank) continue;
    const auto found = stall.others.find(rank);
    const bool waits = found != stall.others.end() && has_come(stall, found->second) &&
                       stall.processes.count(rank) == 0;
    (waits ? ranks.waiting : ranks.late).push_back(rank);
  }
  const std::vector<int> late = ranks.late;
  for (const int rank : late) {
    if (!is_held_up(stall, rank, late)) continue;
    ranks.late.erase(std::find(ranks.late.begin(), ranks.late.end(), rank));
    ranks.waiting.push_back(rank);
  }
  std::sort(ranks.waiting.begin(), ranks.waiting.end());
  if (!stall.store_answers) ranks.late.clear();
  for (const auto& [rank, state] : stall.processes) {
    if (std::find(ranks.late.begin(), ranks.late.end(), rank) == ranks.late.end())
      ranks.late.push_back(rank);
  }
  return ranks;
}

}  // namespace

bool is_stall(const Stall& stall) { return !stall.on_device || !sorted(stall).late.empty(); }

std::string signature(const Stall& stall) {
  // Several ranks may wait for the same rank in different calls, so compare the position of that
  // rank.
  const std::vector<int> late = sorted(stall).late;
  const bool known = std::all_of(late.begin(), late.end(), [&](int rank) {
    return stall.others.count(rank) != 0 || stall.processes.count(rank) != 0;
  });
  std::string text = stall.on_device || (known && !late.empty())
                         ? std::string()
                         : stall.mine.group + ' ' + std::to_string(stall.mine.call) + ' ';
  for (const int rank : late) {
    text += std::to_string(rank);
    const auto process = stall.processes.find(rank);
    if (process != stall.processes.end()) text += process->second;
    const auto other = stall.others.find(rank);
    if (other == stall.others.end()) continue;
    Whereabouts at = other->second;
    at.seconds = 0;
    at.asked = 0;
    at.reached = {};
    at.state = place_in_backward(at.state);
    text += at.encode();
  }
  return text;
}

std::string Whereabouts::encode() const {
  PlainText out;
  out << std::quoted(group) << ' ' << call << ' ' << std::quoted(what) << ' ' << waits << ' '
      << seconds << ' ' << asked << ' ' << reached.size();
  for (const auto& [name, number] : reached) out << ' ' << std::quoted(name) << ' ' << number;
  out << ' ' << std::quoted(state);
  return out.str();
}

Whereabouts Whereabouts::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  Whereabouts read;
  in >> std::quoted(read.group) >> read.call >> std::quoted(read.what) >> read.waits >>
      read.seconds >> read.asked;
  size_t groups = 0;
  in >> groups;
  for (std::string name; groups > 0 && in >> std::quoted(name); --groups) in >> read.reached[name];
  in >> std::quoted(read.state);
  return read;
}

std::string Said::encode() const {
  PlainText out;
  out << times << ' ' << rank << ' ' << std::quoted(group) << ' ' << call << ' '
      << std::quoted(signature) << ' ' << std::quoted(verdict);
  return out.str();
}

Said Said::decode(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  Said read;
  in >> read.times >> read.rank >> std::quoted(read.group) >> read.call >>
      std::quoted(read.signature) >> std::quoted(read.verdict);
  return read;
}

std::string describe(const Stall& stall) {
  std::string text = (stall.on_device ? "the GPU of rank " : "rank ") + std::to_string(stall.rank) +
                     " of " + std::to_string(stall.size) + " has waited for " +
                     seconds_of(stall.mine.seconds) + " in: " + stall.mine.what;
  if (!stall.store_answers && stall.processes.empty()) {
    return text +
           "\n  who:   unknown: the store, through which ranks report, does not answer"
           "\n  why:   its process (rank 0 or the launcher) has ended, is stopped or unreachable"
           "\n  next:  check that this process is running and its host can be reached";
  }
  const auto [late, waiting] = sorted(stall);
  if (late.empty()) {
    return text +
           "\n  who:   no rank is late: all ranks wait in this collective"
           "\n  why:   the network is slow or broken, or a rank is slow to compute its part"
           "\n  next:  check the load of the hosts and their network" +
           indented(stall.mine.state);
  }
  const std::string note = stall.note.empty() ? stall.note : "\n  (" + stall.note.substr(2) + ")";
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
  return text + note;
}

}  // namespace apex::parallel
