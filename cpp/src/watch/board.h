// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What the ranks of a group report to each other, through the group's store.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "watch/process_state.h"
#include "watch/record.h"

namespace apex::parallel {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Note [Calls of the store]
//
// A call blocks while the process that hosts the store is stopped, and for long on a loaded host.
// So one thread makes all calls of a store, and no other thread waits for it, except for the report
// of a failure. The thread is detached: if it is blocked in a call, it is left behind. A TCPStore
// is cloned on that thread, which connects to its server, since destroy_process_group() must end
// the job's store, which frees its port. After an error the store is lost: no call is made twice,
// and torch logs every call of a lost store.
//
// Failures are appended to one key, since with a key for each rank N ranks would make N^2 requests.
// A rank that is in no collective looks for news every kIdle; reports of a rank on the same host
// wake it at once. Stores that cannot append, such as a FileStore, carry no reports.

class StoreThread;

/// One rank's view of a group's reports; the groups made from it share it. Thread safe.
class Board : public std::enable_shared_from_this<Board> {
 public:
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(c10d::Store& store)>;

  /// `timeout` of the group's collectives; 0: unknown.
  Board(const c10d::ProcessGroup& group, std::chrono::milliseconds timeout);
  ~Board();
  /// Publishes this rank's process, and begins to look for news and to answer.
  void begin();

  const std::string group_name;
  const int rank;
  const int size;
  const std::chrono::milliseconds timeout;
  const std::chrono::milliseconds patience;  ///< see report_failure()
  bool has_store() const { return thread_ != nullptr; }
  /// Whether all ranks are on this host, so that each of them is woken by a report.
  bool all_on_this_host();

  /// Runs `body` on the store's thread, after earlier posts. The future has its exception.
  /// @throws Error through the future if the store is lost.
  std::shared_future<void> post(Body body);
  /// Calls `job` on the store's thread at `at`. Only if has_store().
  void run_at(Clock::time_point at, std::function<void()> job);
  /// A key of the store, the same on all ranks; used on the store's thread.
  std::string key(const std::string& what) const { return "apex/" + what + '/' + name_; }

  // --- failures ---

  /// Reports that a collective of the group has failed on this rank, or more proof. Does not wait.
  std::shared_future<void> report(const std::string& what, const Proof& proof);
  bool has_failed() const { return has_failed_; }
  /// As last read.
  RankRecords reports();

  // --- processes of this host's ranks ---

  void add_processes(std::map<int, ProcessName> found);
  std::map<int, ProcessName> processes();
  /// Reads those that are published, if none is known. Used on the store's thread.
  void find_processes(c10d::Store& store);
  /// Those that have exited or are stopped.
  Proof look_around(std::optional<ProcessState> only = {});
  /// Makes the ranks of this host look for news.
  void wake();

  // --- polling ---

  /// Looks for news, on the store's thread.
  void look_now();
  /// Whether a rank that does not wait may look: a process that has ended may have hosted the
  /// store, and torch logs every call of a lost store.
  bool may_look_when_idle() { return look_around(ProcessState::kEnded).empty(); }
  /// Looks now if the last look is older.
  void look_if_older(std::chrono::milliseconds age);
  /// Whether the store has answered a look that began after `time`.
  bool answered_since(Clock::time_point time) const { return answered_.load() >= time; }
  /// Whether the store has raised an error since `time`.
  bool failed_since(Clock::time_point time) const { return failed_.load() >= time; }
  /// Blocks until there may be news, or `until`.
  void wait_for_news(Clock::time_point until);

  /// Result of report_failure(), and until when it is reused.
  std::mutex verdict_mutex;
  std::string verdict;
  Clock::time_point verdict_until;
  /// Whether this rank has answered that it is in no collective.
  std::atomic<bool> answered_elsewhere{false};

 private:
  void run(const Body& body);
  void look();
  void look_when_idle();

  std::shared_ptr<StoreThread> thread_;
  std::atomic<bool> look_is_queued_{false};
  std::atomic<Clock::time_point> looked_{Clock::time_point()};
  std::atomic<bool> has_failed_{false};
  std::atomic<Clock::time_point> answered_{Clock::time_point()}, failed_{Clock::time_point()};

  // Used on the store's thread:
  StorePtr given_, store_;
  std::string name_;  ///< group name and instance number
  int64_t seen_ = 0, seen_asked_ = 0;

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  RankRecords reports_;
  std::map<int, ProcessName> processes_;
};

/// The value of `key`, or "" if it is unset. Does not wait for the key.
std::string get_or_empty(c10d::Store& store, const std::string& key);

/// How long the process that usually hosts the store stays after it has reported a failure, so that
/// other ranks can read the report. Called at its end.
void stay_for_readers();

}  // namespace apex::parallel
