#include "comm/failure_report.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/bounded_call.h"
#include "comm/call_history.h"
#include "comm/process_state.h"
#include "distributed/backends.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

constexpr milliseconds kMostPatience{5000};
constexpr milliseconds kLeastPatience{500};
constexpr milliseconds kFarewell{2000};
constexpr milliseconds kVerdictHolds{10000};
constexpr milliseconds kLook{20};        // between two looks of who collects
constexpr milliseconds kListen{200};     // and of who waits
constexpr milliseconds kLate{2000};      // until who waits looks whether the others are where it is
constexpr milliseconds kAfterProof{100};  // in which more proof is gathered

struct Known;
using KnownPtr = std::shared_ptr<Known>;

/// What this rank knows of a group.
struct Known {
  std::string name;  ///< of the group, and how often there was one; the same on all ranks
  /// Not held: a store that outlives its group keeps its port.
  c10::weak_intrusive_ptr<c10d::Store> store{c10::intrusive_ptr<c10d::Store>()};
  int rank = 0;
  int size = 1;

  std::mutex mutex;
  std::map<int, ProcessName> processes;  ///< of other ranks
  std::string verdict;                   ///< what report_failure() has found
  Clock::time_point verdict_until;       ///< it is not asked for again until then
  std::atomic<bool> asked{false};      ///< for the processes
  std::atomic<bool> announced{false};  ///< a failure, without a collective
  std::atomic<bool> reported_from_elsewhere{false};
  KnownPtr heard_too;                  ///< another group, whose failures are this one's as well
};

/// By group. Never destroyed, as threads may be left behind.
struct Groups {
  struct Entry {
    const void* store;
    std::string name;
    KnownPtr known;
    std::shared_ptr<CallHistory> calls;
  };
  std::mutex introduction;
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, Entry> entries;
};

Groups& groups() {
  static auto* const instance = new Groups;
  return *instance;
}

/// Of the group, and not of another one that was at the same address.
std::optional<Groups::Entry> find_entry(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  const auto found = groups().entries.find(&group);
  if (found == groups().entries.end()) return std::nullopt;
  const Groups::Entry& entry = found->second;
  if (entry.store != group.getStore().get() || entry.name != group.getGroupName()) return std::nullopt;
  return entry;
}

KnownPtr find(const c10d::ProcessGroup& group) {
  const auto entry = find_entry(group);
  return entry ? entry->known : nullptr;
}

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }

std::string process_key(const std::string& group, int rank) {
  return "apex/process/" + group + "/" + std::to_string(rank);
}

/// Counts the reports.
std::string count_key(const std::string& group) { return "apex/failure/" + group + "/count"; }

std::string report_key(const std::string& group, int rank) {
  return "apex/failure/" + group + "/" + std::to_string(rank);
}

/// A rank has refused the arguments of that call.
std::string refusal_key(const std::string& group, int64_t call) {
  return "apex/refused/" + group + "/" + std::to_string(call);
}

std::string farewell_key(const std::string& group, int rank) { return report_key(group, rank) + "/left"; }

/// A connection of its own, which is not shared with who may block in it; for stores that have connections. (A file
/// is removed when as many stores on it have ended as there are ranks, copies included.)
StorePtr own_connection(const StorePtr& store) {
  const c10d::Store* base = store.get();
  while (const auto* const prefixed = dynamic_cast<const c10d::PrefixStore*>(base)) {
    base = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore().get();
  }
  return dynamic_cast<const c10d::TCPStore*>(base) != nullptr ? store->clone() : store;
}

milliseconds patience_of(const c10d::ProcessGroup& group) {
  std::optional<milliseconds> timeout;
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (mutable_group.hasBackendForDeviceType(at::kCPU)) {
    timeout = distributed::gloo_timeout(*mutable_group.getBackend(at::kCPU));
  }
  return timeout ? std::clamp(*timeout / 8, kLeastPatience, kMostPatience) : kMostPatience;
}

/// As the ranks have told.
void read_processes(const StorePtr& store, Known& known) {
  std::map<int, ProcessName> found;
  for (int rank = 0; rank < known.size; ++rank) {
    const std::string key = process_key(known.name, rank);
    if (rank == known.rank || !store->check({key})) continue;
    if (auto process = ProcessName::decode(text_of(store->get(key)))) found.emplace(rank, std::move(*process));
  }
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.processes = std::move(found);
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// What has been found out about a failure. Written by the thread that talks to the store.
struct Findings {
  std::mutex mutex;
  std::map<int, std::string> reports;  ///< by rank: the collective that failed there
  std::map<int, std::string> proof;    ///< by rank: what has become of its process
  bool store_answers = false;          ///< to the last call
};

/// How long to go on looking once there is proof: for more of it, and for what the others say.
constexpr milliseconds kForOthers{300};

/// A report: the ranks that this one has proof against, one "RANK TEXT" a line, and what failed.
std::string encode(const std::map<int, std::string>& proof, const std::string& what) {
  std::string text;
  for (const auto& [rank, state] : proof) text += std::to_string(rank) + ' ' + state + '\n';
  return text + '\n' + what;
}

void decode(const std::string& text, int from, Findings& findings) {
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != begin && end != std::string::npos; end = text.find('\n', begin)) {
    const size_t space = text.find(' ', begin);
    findings.proof.emplace(std::atoi(text.c_str() + begin), text.substr(space + 1, end - space - 1));
    begin = end + 1;
  }
  findings.reports[from] = text.substr(std::min(begin + 1, text.size()));
}

/// Looks at the processes of this host.
std::map<int, std::string> look_around(Known& known) {
  std::map<int, ProcessName> processes;
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    processes = known.processes;
  }
  std::map<int, std::string> proof;
  for (const auto& [rank, process] : processes) {
    const std::string name = "process " + std::to_string(process.pid);
    const ProcessState state = state_of(process);
    if (state == ProcessState::kEnded) proof[rank] = "has ended (" + name + ")";
    if (state == ProcessState::kStopped) proof[rank] = "is stopped (" + name + ", by a signal or a debugger)";
  }
  return proof;
}

/// Reports, and reads what the others report, until all are accounted for or `until`.
void collect(const StorePtr& store, Known& known, const std::string& what, Clock::time_point until,
             const std::atomic<bool>& stop, Findings& findings) {
  // First: others may be waiting for this rank.
  std::map<int, std::string> said = look_around(known);
  store->set(report_key(known.name, known.rank), bytes(encode(said, what)));
  store->add(count_key(known.name), 1);
  const StorePtr others_store = known.heard_too ? known.heard_too->store.lock() : nullptr;
  const StorePtr other = others_store ? own_connection(others_store) : nullptr;
  const std::string others_name = other ? known.heard_too->name : std::string();
  if (other) {
    other->set(report_key(others_name, known.rank), bytes(encode(said, what)));
    known.heard_too->reported_from_elsewhere = true;
  }
  bool none = false;
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    none = known.processes.empty();
  }
  if (none) read_processes(store, known);
  while (!stop) {
    bool all = true;
    for (int rank = 0; rank < known.size; ++rank) {
      {
        const std::lock_guard<std::mutex> lock(findings.mutex);
        if (rank == known.rank || findings.reports.count(rank) != 0) continue;
      }
      StorePtr place = store;
      std::string key = report_key(known.name, rank);
      if (!store->check({key}) && other) {
        place = other;
        key = report_key(others_name, rank);
      }
      if (!place->check({key})) {
        all = false;
        continue;
      }
      const std::string report = text_of(place->get(key));
      const std::lock_guard<std::mutex> lock(findings.mutex);
      decode(report, rank, findings);
    }
    // After the reports: who has reported may end.
    const std::map<int, std::string> seen = look_around(known);
    if (seen.size() > said.size()) {
      said = seen;
      store->set(report_key(known.name, known.rank), bytes(encode(said, what)));
    }
    {
      const std::lock_guard<std::mutex> lock(findings.mutex);
      findings.proof.insert(seen.begin(), seen.end());
      for (const auto& [rank, report] : findings.reports) findings.proof.erase(rank);
      findings.store_answers = true;
      if (!findings.proof.empty()) until = std::min(until, Clock::now() + kAfterProof);
    }
    if (all || Clock::now() >= until) break;
    std::this_thread::sleep_for(kLook);
  }
}

/// The process that keeps the store takes it along when it ends, so that those who hear of the failure late, or
/// read slowly, find nothing. As a rule it is rank 0, which waits a little for them.
void say_farewell(const StorePtr& store, const Known& known, const std::set<int>& lost, const std::atomic<bool>& stop) {
  store->set(farewell_key(known.name, known.rank), std::vector<uint8_t>{1});
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun keeps it
  if (known.rank != 0 || (agent != nullptr && std::string(agent) == "True")) return;
  std::vector<std::string> others;
  for (int rank = 1; rank < known.size; ++rank) {
    if (lost.count(rank) == 0) others.push_back(farewell_key(known.name, rank));
  }
  const auto until = Clock::now() + kFarewell;
  while (!stop && !others.empty() && !store->check(others) && Clock::now() < until) {
    std::this_thread::sleep_for(kLook);
  }
}

std::string describe(const Findings& findings, const Known& known, const std::string& what, milliseconds patience) {
  std::string text;
  for (const auto& [rank, state] : findings.proof) text += "; rank " + std::to_string(rank) + ' ' + state;
  if (!findings.store_answers) {
    return text + "; the store, through which ranks report, does not answer: the process that keeps it, as a rule "
                  "rank 0 or the launcher, has ended, is stopped, or is cut off";
  }
  if (!findings.proof.empty()) return text;
  std::vector<int> silent;
  for (int rank = 0; rank < known.size; ++rank) {
    if (rank != known.rank && findings.reports.count(rank) == 0) silent.push_back(rank);
  }
  if (!silent.empty()) {
    text += "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") + " not reported this failure within " +
            std::to_string(patience.count()) + " ms: stopped, cut off, or never came to this collective";
  }
  if (silent.empty()) text += "; every rank has reported this failure, and none has ended";
  for (const auto& [rank, other] : findings.reports) {
    if (other != what) text += "; rank " + std::to_string(rank) + " failed in " + other;
  }
  return text;
}

std::string investigate(const c10d::ProcessGroup& group, const KnownPtr& known, const std::string& what) {
  const StorePtr store = known->store.lock();
  if (!store) return {};
  const milliseconds patience = patience_of(group);
  const auto findings = std::make_shared<Findings>();
  auto until = Clock::now() + patience;
  BoundedCall talk([=](const std::atomic<bool>& stop) {
    try {
      collect(own_connection(store), *known, what, until, stop, *findings);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(findings->mutex);
      findings->store_answers = false;
    }
  });
  // What this rank sees by itself, and at first: others end when they have given up, too.
  std::map<int, std::string> seen;
  while (!talk.wait_until(std::min(until + kLook, Clock::now() + kLook)) && Clock::now() < until + kLook) {
    if (!seen.empty() || (seen = look_around(*known)).empty()) continue;
    until = std::min(until, Clock::now() + kForOthers);
  }
  talk.leave();
  std::set<int> lost;
  std::string text;
  {
    const std::lock_guard<std::mutex> lock(findings->mutex);
    if (!findings->store_answers) {
      if (seen.empty()) seen = look_around(*known);
      for (const auto& [rank, state] : seen) {
        if (findings->reports.count(rank) == 0) findings->proof.emplace(rank, state);
      }
    }
    const bool proven = !findings->proof.empty();
    for (int rank = 0; rank < known->size; ++rank) {
      // Without proof everybody had the time to come.
      if (proven ? findings->proof.count(rank) != 0 : findings->reports.count(rank) == 0) lost.insert(rank);
    }
    text = describe(*findings, *known, what, patience);
    if (!findings->store_answers) return text;
  }
  BoundedCall([=](const std::atomic<bool>& stop) { say_farewell(own_connection(store), *known, lost, stop); })
      .wait_until(Clock::now() + kFarewell + kLook);
  return text;
}

void enter(const c10d::ProcessGroup& group, const KnownPtr& known) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  groups().entries[&group] = {group.getStore().get(), group.getGroupName(), known, std::make_shared<CallHistory>()};
}

}  // namespace

void introduce_to(const c10d::ProcessGroup& group) noexcept try {
  if (group.getSize() == 1 || find(group)) return;
  const StorePtr store = group.getStore();
  if (!store) return;
  const std::lock_guard<std::mutex> lock(groups().introduction);
  if (find(group)) return;
  const auto known = std::make_shared<Known>();
  known->rank = group.getRank();
  known->size = group.getSize();
  known->store = c10::weak_intrusive_ptr<c10d::Store>(store);
  // A group of this name may have been there before, on a store that outlives it.
  const auto name = std::make_shared<std::string>();
  BoundedCall call([=, rank = known->rank, group_name = group.getGroupName()](const std::atomic<bool>&) {
    const int64_t times = store->add("apex/introduced/" + group_name + "/" + std::to_string(rank), 1);
    *name = group_name + "/" + std::to_string(times);
    if (const auto process = this_process()) store->set(process_key(*name, rank), bytes(process->encode()));
  });
  if (call.wait_until(Clock::now() + patience_of(group))) known->name = *name;
  enter(group, known);
} catch (...) {
  // A collective that fails will say what is wrong with the store.
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  introduce_to(group);
  const auto entry = find_entry(group);
  if (!entry) return;
  entry->calls->add(what);
  // What another group has reported here is over when this one goes on.
  const StorePtr store = entry->known->reported_from_elsewhere.exchange(false) ? group.getStore() : nullptr;
  if (!store) return;
  BoundedCall([=, known = entry->known](const std::atomic<bool>&) {
    store->deleteKey(report_key(known->name, known->rank));
  }).wait_until(Clock::now() + patience_of(group));
} catch (...) {
  // As above.
}

void hear_too(const c10d::ProcessGroup& group, const c10d::ProcessGroup& other) noexcept try {
  introduce_to(other);
  introduce_to(group);
  const KnownPtr known = find(group);
  const KnownPtr parent = find(other);
  if (!known || !parent || known == parent) return;
  known->heard_too = parent;
  const std::lock_guard<std::mutex> lock(parent->mutex);
  known->processes = parent->processes;
  known->asked = true;
} catch (...) {
  // As above.
}

void remember_processes(const c10d::ProcessGroup& group) noexcept try {
  introduce_to(group);
  const KnownPtr known = find(group);
  if (!known || known->asked.exchange(true)) return;
  const StorePtr store = known->store.lock();
  if (!store) return;
  BoundedCall([=](const std::atomic<bool>&) { read_processes(store, *known); })
      .wait_until(Clock::now() + patience_of(group));
} catch (...) {
  // As above.
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const KnownPtr known = find(group);
  if (!known) return false;
  const std::lock_guard<std::mutex> lock(known->mutex);
  return known->announced || known->verdict_until != Clock::time_point();
}

void refuse_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  begin_call(group, what);
  const auto entry = find_entry(group);
  if (!entry) return;
  const StorePtr store = group.getStore();
  const std::string text = std::to_string(entry->known->rank) + ' ' + what;
  BoundedCall([=, name = entry->known->name, call = entry->calls->last_number()](const std::atomic<bool>&) {
    store->set(refusal_key(name, call), bytes(text));
  }).wait_until(Clock::now() + patience_of(group));
} catch (...) {
  // The others wait until their timeout.
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  introduce_to(group);
  const KnownPtr known = find(group);
  if (!known) return;
  known->announced = true;
  const StorePtr store = known->store.lock();
  if (!store) return;
  BoundedCall([=](const std::atomic<bool>&) {
    store->set(report_key(known->name, known->rank), bytes(encode({}, what)));
    store->add(count_key(known->name), 1);
  }).wait_until(Clock::now() + patience_of(group));
} catch (...) {
  // The others wait until their timeout.
}

std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  introduce_to(group);
  const KnownPtr known = find(group);
  if (!known) return {};
  {
    const std::lock_guard<std::mutex> lock(known->mutex);
    if (Clock::now() < known->verdict_until) return known->verdict;
  }
  std::string verdict = investigate(group, known, what);
  const std::lock_guard<std::mutex> lock(known->mutex);
  known->verdict = verdict;
  known->verdict_until = Clock::now() + kVerdictHolds;
  return verdict;
} catch (...) {
  return {};
}

struct FailureListener::State {
  std::atomic<bool> heard{false};
  std::mutex mutex;
  std::string apart;
  std::condition_variable wake;
  bool ended = false;
};

FailureListener::FailureListener(const c10d::ProcessGroup& group) : state_(std::make_shared<State>()) {
  const auto entry = find_entry(group);
  const StorePtr store = entry ? entry->known->store.lock() : nullptr;
  if (!store) return;
  std::thread([state = state_, store, entry = *entry, call = entry->calls->last_number()] {
    const std::string name = count_key(entry.known->name);
    const KnownPtr& other = entry.known->heard_too;
    const StorePtr others_store = other ? other->store.lock() : nullptr;
    try {
      const StorePtr own = own_connection(store);
      const StorePtr others_own = others_store ? own_connection(others_store) : nullptr;
      auto compare_at = Clock::now() + kLate;
      std::unique_lock<std::mutex> lock(state->mutex);
      while (!state->ended) {
        lock.unlock();
        if (own->add(name, 0) > 0) state->heard = true;
        if (others_own && others_own->add(count_key(other->name), 0) > 0) state->heard = true;
        if (own->check({refusal_key(entry.known->name, call)})) state->heard = true;
        std::string apart;
        if (!state->heard && Clock::now() >= compare_at) {
          apart = entry.calls->compare(*own, entry.known->name, entry.known->rank);
          compare_at = Clock::time_point::max();
        }
        lock.lock();
        state->apart = std::move(apart);
        if (state->heard || !state->apart.empty()) return;
        state->wake.wait_for(lock, kListen, [&] { return state->ended; });
      }
      entry.calls->forget(*own);
    } catch (...) {
      // The store is lost: the collective will end by itself.
    }
  }).detach();
}

FailureListener::~FailureListener() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ended = true;
  state_->wake.notify_all();
}

bool FailureListener::heard() const { return state_->heard; }

std::string FailureListener::apart() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->apart;
}

}  // namespace apex::parallel
