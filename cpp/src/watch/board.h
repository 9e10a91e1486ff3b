// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What the ranks of a group report to each other, through the group's store.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
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

// Note [Calls of the store]
//
// A call blocks while the process that hosts the store is stopped, and for long on a loaded host.
// So one thread makes all calls of a board, and no other thread waits for it, except for the report
// of a failure. The thread is detached: if it is blocked in a call, it is left behind. It clones
// the store, which connects to the server, since destroy_process_group() must end the job's store,
// which frees its port. After an error the store is lost: no call is made twice, and torch logs
// every call of a lost store.
//
// Failures are appended to one key, since with a key for each rank N ranks would make N^2 requests.
// A rank that is in no collective looks for news every kIdle; reports of a rank on the same host
// wake it at once. Stores that cannot append, such as a FileStore, carry no reports.

/// One rank's view of a group's reports; the groups made from it share it. Thread safe.
class Board : public std::enable_shared_from_this<Board> {
 public:
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(c10d::Store& store)>;

  /// The last reference to the result ends the board's thread after the posts so far.
  /// @param timeout  of the group's collectives; 0: unknown.
  static std::shared_ptr<Board> create(const c10d::ProcessGroup& group,
                                       std::chrono::milliseconds timeout);
  Board(const c10d::ProcessGroup& group, std::chrono::milliseconds timeout);
  ~Board();
  /// Publishes this rank's process, and begins to look for news and to answer.
  void begin();

  const std::string group_name;
  const int rank;
  const int size;
  const std::chrono::milliseconds timeout;
  const std::chrono::milliseconds patience;  ///< see report_failure()
  const bool has_store;
  /// Whether all ranks are on this host, so that each of them is woken by a report.
  bool all_on_this_host();

  /// Runs `body` on the board's thread, after earlier posts. The future has its exception.
  /// @throws Error through the future if the store is lost.
  std::shared_future<void> post(Body body);

  // On the board's thread:

  /// A key of the store, the same on all ranks.
  std::string key(const std::string& what) const { return "apex/" + what + '/' + name_; }
  /// The key of the last position of `rank`; its earlier ones are obsolete.
  std::string key_of(int of_rank) const { return key("rank") + '/' + std::to_string(of_rank); }
  /// Writes where this rank is. Returns whether it waits.
  bool publish(c10d::Store& store);
  /// Asks all ranks for their positions. Returns how often ranks have asked.
  int64_t ask(c10d::Store& store);

  // --- failures ---

  /// Reports that a collective of the group has failed on this rank, or more proof. Does not wait.
  /// `cause`: if the other ranks do not know it.
  std::shared_future<void> report(const std::string& what, const std::string& cause,
                                  const Proof& proof);
  bool has_failed() const { return has_failed_; }
  /// As last read.
  RankRecords reports();

  // --- processes of this host's ranks ---

  void add_processes(std::map<int, ProcessName> found);
  std::map<int, ProcessName> processes();
  /// Those that have exited or are stopped.
  Proof look_around(std::optional<ProcessState> only = {});

  // --- looking for news ---

  /// Looks for news now if the last look is older. Without `needs`, not after a process has ended:
  /// it may have hosted the store.
  void look_if_older(std::chrono::milliseconds age, bool needs = true);
  /// From now on GPUs' waits are watched too.
  void watch_gpus();
  /// Whether the store has answered a look that began after `time`.
  bool answered_since(Clock::time_point time) const { return answered_.load() >= time; }
  /// Whether the store has raised an error since `time`.
  bool failed_since(Clock::time_point time) const { return failed_.load() >= time; }
  /// Blocks until there may be news, or `until`.
  void wait_for_news(Clock::time_point until);

  /// Result of report_failure().
  std::mutex verdict_mutex;
  std::optional<std::string> verdict;
  /// Whether this rank has answered that it is in no collective. Its next wait corrects that.
  std::atomic<bool> said_elsewhere{false};

 private:
  void run(const Body& body);
  void loop();
  void look();
  void read_news(c10d::Store& store);
  void find_processes(c10d::Store& store);
  void wake();

  std::atomic<bool> has_failed_{false};
  std::atomic<Clock::time_point> answered_{Clock::time_point()}, failed_{Clock::time_point()};

  // Used on the board's thread:
  c10::intrusive_ptr<c10d::Store> given_, store_;
  std::string name_;  ///< group name and instance number
  int64_t seen_ = 0, asked_ = 0;

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  std::deque<std::function<void()>> jobs_;
  Clock::time_point looked_, look_at_, watch_at_ = Clock::time_point::max();
  bool needs_look_ = false;
  bool ended_ = false;
  RankRecords reports_;
  std::map<int, ProcessName> processes_;
};

/// The value of `key`, or "" if it is unset. Does not wait for the key.
std::string get_or_empty(c10d::Store& store, const std::string& key);

/// How long the process that usually hosts the store stays after it has reported a failure, so that
/// other ranks can read the report. Called at its end.
void stay_for_readers();

}  // namespace apex::parallel
