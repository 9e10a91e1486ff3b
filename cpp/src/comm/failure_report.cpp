// SPDX-License-Identifier: BSD-3-Clause
#include "comm/failure_report.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "comm/bounded_call.h"
#include "comm/group_record.h"
#include "comm/process_state.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFarewell{2000};
constexpr milliseconds kVerdictHolds{10000};
constexpr milliseconds kLook{20};  // between two looks of who collects
// How long to go on looking once there is proof, for more of it: of who collects, and of who waits
// for that.
constexpr milliseconds kAfterProof{100};
constexpr milliseconds kForOthers{300};

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// What has been found out about a failure. Written by the thread that talks to the store.
struct Findings {
  std::mutex mutex;                    ///< guards the rest
  std::map<int, std::string> reports;  ///< by rank: the collective that failed there
  std::map<int, std::string> proof;    ///< by rank: what has become of its process
  bool store_answers = false;          ///< to the last call
};

/// A report: the ranks that this one has proof against, one "RANK TEXT" a line, and what failed.
std::string encode(const std::map<int, std::string>& proof, const std::string& what) {
  std::string text;
  for (const auto& [rank, state] : proof) text += std::to_string(rank) + ' ' + state + '\n';
  return text + '\n' + what;
}

void decode(const std::string& text, int from, Findings& findings) {
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != begin && end != std::string::npos;
       end = text.find('\n', begin)) {
    const size_t space = text.find(' ', begin);
    findings.proof.emplace(std::atoi(text.c_str() + begin),
                           text.substr(space + 1, end - space - 1));
    begin = end + 1;
  }
  findings.reports[from] = text.substr(std::min(begin + 1, text.size()));
}

/// Reports, and reads what the others report, until all are accounted for or `until`.
void collect(const StorePtr& store, GroupRecord& record, const std::string& what,
             Clock::time_point until, const std::atomic<bool>& stop, Findings& findings) {
  // First: others may be waiting for this rank.
  std::map<int, std::string> seen = look_around(record);
  std::map<int, std::string> said = seen;
  std::vector<std::pair<StorePtr, NoticeBoard>> places{{store, record.report_board()}};
  places[0].second.post(*store, record.rank, encode(said, what));
  store->add(record.count_key(), 1);
  if (const StorePtr other = record.heard_too ? record.heard_too->store.lock() : nullptr) {
    places.emplace_back(own_connection(other), record.heard_too->report_board());
    places[1].second.post(*places[1].first, record.rank, encode(said, what));
    record.heard_too->reported_from_elsewhere = true;
  }
  bool none = false;
  {
    const std::lock_guard<std::mutex> lock(record.mutex);
    none = record.processes.empty();
  }
  if (none) read_processes(*store, record);
  int64_t read = 0;
  while (!stop) {
    int64_t posts = 0;
    for (const auto& [place, board] : places) posts += board.posts(*place);
    if (posts != read) {
      read = posts;
      for (auto at = places.rbegin(); at != places.rend(); ++at) {  // what is said here counts most
        const std::map<int, std::string> reports = at->second.read(*at->first);
        const std::lock_guard<std::mutex> lock(findings.mutex);
        for (const auto& [rank, report] : reports) {
          if (rank != record.rank) decode(report, rank, findings);
        }
      }
    }
    // What was seen before the reports were read: a rank that has reported may end.
    bool all = false;
    {
      const std::lock_guard<std::mutex> lock(findings.mutex);
      all = static_cast<int>(findings.reports.size()) == record.size - 1;
      findings.proof.insert(seen.begin(), seen.end());
      for (const auto& [rank, report] : findings.reports) findings.proof.erase(rank);
      findings.store_answers = true;
      if (!findings.proof.empty()) until = std::min(until, Clock::now() + kAfterProof);
    }
    if (all || Clock::now() >= until) break;
    std::this_thread::sleep_for(record.between_looks());
    seen = look_around(record);
    if (seen.size() > said.size()) {
      said = seen;
      places[0].second.post(*store, record.rank, encode(said, what));
    }
  }
}

/// The process that keeps the store takes it along when it ends, so that those who hear of the
/// failure late, or read slowly, find nothing. As a rule it is rank 0, which waits a little for
/// them; they may have failed in the group that is heard, too.
void say_farewell(const StorePtr& store, const GroupRecord& record, const std::set<int>& lost,
                  const std::atomic<bool>& stop) {
  std::vector<std::pair<StorePtr, const GroupRecord*>> places{{own_connection(store), &record}};
  if (const StorePtr other = record.heard_too ? record.heard_too->store.lock() : nullptr) {
    places.emplace_back(own_connection(other), record.heard_too.get());
  }
  for (const auto& [place, group] : places) place->set(group->farewell_key(record.rank), "1");
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun keeps it
  if (record.rank != 0 || (agent != nullptr && std::string(agent) == "True")) return;
  const auto until = Clock::now() + kFarewell;
  for (int rank = 1; rank < record.size; ++rank) {
    const auto has_left = [&, rank](const auto& place) {
      return place.first->check({place.second->farewell_key(rank)});
    };
    while (lost.count(rank) == 0 && std::none_of(places.begin(), places.end(), has_left)) {
      if (stop || Clock::now() >= until) return;
      std::this_thread::sleep_for(kLook);
    }
  }
}

std::string describe(const Findings& findings, GroupRecord& record, const std::string& what,
                     milliseconds patience) {
  std::string text;
  for (const auto& [rank, state] : findings.proof)
    text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!findings.store_answers) {
    return text +
           "; the store, through which ranks report, does not answer: the process that keeps it, "
           "as a rule "
           "rank 0 or the launcher, has ended, is stopped, or is cut off";
  }
  if (!findings.proof.empty()) return text;
  std::vector<int> silent;
  for (int rank = 0; rank < record.size; ++rank) {
    if (rank != record.rank && findings.reports.count(rank) == 0) silent.push_back(rank);
  }
  if (!silent.empty()) {
    text += "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") +
            " not reported this failure within " + std::to_string(patience.count()) +
            " ms: stopped, cut off, or never came to this collective";
  }
  if (silent.empty()) {
    text += "; every rank has reported this failure";
    if (look_around(record, ProcessState::kEnded).empty()) text += ", and none has ended";
  }
  for (const auto& [rank, other] : findings.reports) {
    if (other != what) text += "; rank " + std::to_string(rank) + " failed in " + other;
  }
  return text;
}

std::string investigate(const c10d::ProcessGroup& group, const GroupRecordPtr& record,
                        const std::string& what) {
  const StorePtr store = record->store.lock();
  if (!store) return {};
  const milliseconds patience = patience_of(group);
  const auto findings = std::make_shared<Findings>();
  auto until = Clock::now() + patience;
  BoundedCall talk([=](const std::atomic<bool>& stop) {
    try {
      collect(own_connection(store), *record, what, until, stop, *findings);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(findings->mutex);
      findings->store_answers = false;
    }
  });
  // What this rank sees by itself, and at first: others end when they have given up, too.
  std::map<int, std::string> seen;
  while (!talk.wait_until(std::min(until + kLook, Clock::now() + kLook)) &&
         Clock::now() < until + kLook) {
    if (!seen.empty() || (seen = look_around(*record)).empty()) continue;
    until = std::min(until, Clock::now() + kForOthers);
  }
  talk.leave();
  std::set<int> lost;
  std::string text;
  {
    const std::lock_guard<std::mutex> lock(findings->mutex);
    if (!findings->store_answers) {
      const std::lock_guard<std::mutex> record_lock(record->mutex);
      if (!record->ended_first.empty()) seen = record->ended_first;  // later ones may have given up
    }
    if (!findings->store_answers) {
      if (seen.empty()) seen = look_around(*record);
      for (const auto& [rank, state] : seen) {
        if (findings->reports.count(rank) == 0) findings->proof.emplace(rank, state);
      }
    }
    const bool proven = !findings->proof.empty();
    for (int rank = 0; rank < record->size; ++rank) {
      // Without proof everybody had the time to come.
      if (proven ? findings->proof.count(rank) != 0 : findings->reports.count(rank) == 0)
        lost.insert(rank);
    }
    text = describe(*findings, *record, what, patience);
    if (!findings->store_answers) return text;
  }
  BoundedCall([=](const std::atomic<bool>& stop) {
    say_farewell(store, *record, lost, stop);
  }).wait_until(Clock::now() + kFarewell + kLook);
  return text;
}

}  // namespace

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const GroupRecordPtr record = record_of(group);
  if (!record) return;
  record->calls.add(what);
  // What another group has reported here is over when this one goes on.
  if (!record->reported_from_elsewhere.exchange(false)) return;
  talk_to_store(group, *record, [record](c10d::Store& store) {
    record->report_board().withdraw(store, record->rank);
    store.deleteKey(record->farewell_key(record->rank));
  });
} catch (...) {
  // A collective that fails will say what is wrong with the store.
}

void hear_too(const c10d::ProcessGroup& group, const c10d::ProcessGroup& other) noexcept try {
  const GroupRecordPtr parent = record_of(other);
  const GroupRecordPtr record = record_of(group);
  if (!record || !parent || record == parent) return;
  record->heard_too = parent;
  const std::lock_guard<std::mutex> lock(parent->mutex);
  record->processes = parent->processes;
  record->asked = true;
} catch (...) {
  // As above.
}

void remember_processes(const c10d::ProcessGroup& group) noexcept try {
  const GroupRecordPtr record = record_of(group);
  if (!record || record->asked.exchange(true)) return;
  talk_to_store(group, *record, [record](c10d::Store& store) { read_processes(store, *record); });
} catch (...) {
  // As above.
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const GroupRecordPtr record = find_record(group);
  if (!record) return false;
  const std::lock_guard<std::mutex> lock(record->mutex);
  return record->announced || record->verdict_until != Clock::time_point();
}

void refuse_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  begin_call(group, what);
  const GroupRecordPtr record = record_of(group);
  if (!record) return;
  record->reported_from_elsewhere = true;  // it is over for this rank
  talk_to_store(
      group, *record,
      [record, what, key = record->refusal_key(record->calls.last_number())](c10d::Store& store) {
        record->report_board().post(store, record->rank, encode({}, what));
        store.set(key, "");
      });
} catch (...) {
  // The others wait until their timeout.
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const GroupRecordPtr record = record_of(group);
  if (!record) return;
  record->announced = true;
  talk_to_store(group, *record, [record, what](c10d::Store& store) {
    record->report_board().post(store, record->rank, encode({}, what));
    store.add(record->count_key(), 1);
  });
} catch (...) {
  // The others wait until their timeout.
}

std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const GroupRecordPtr record = record_of(group);
  if (!record) return {};
  {
    const std::lock_guard<std::mutex> lock(record->mutex);
    if (Clock::now() < record->verdict_until) return record->verdict;
  }
  std::string verdict = investigate(group, record, what);
  const std::lock_guard<std::mutex> lock(record->mutex);
  record->verdict = verdict;
  record->verdict_until = Clock::now() + kVerdictHolds;
  return verdict;
} catch (...) {
  return {};
}

}  // namespace apex::parallel
