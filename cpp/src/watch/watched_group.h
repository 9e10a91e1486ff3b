// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What this rank knows of each process group: its name in the store, the processes behind its
/// ranks, and what the ranks have reported.

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/backends.h"
#include "watch/call_log.h"
#include "watch/process_state.h"
#include "watch/status_board.h"

namespace apex::parallel {

/// Collectives that the host does not wait for: see Note [Collectives that the host does not wait
/// for].
struct Launched {
  struct Call {
    std::unique_ptr<distributed::StreamMark> mark;  ///< behind it
    int64_t number = 0;                             ///< of the last call when the mark was set
    std::string what;
  };
  /// At most so many marks are kept: of more calls every second, fourth, ..., and the last.
  static constexpr size_t kMarks = 32;

  std::deque<Call> calls;  ///< in their order; those that are looked at are not in it
  int64_t count = 0;       ///< calls, also those that are not kept
  int64_t every = 1;       ///< of so many calls one is kept
  std::vector<std::unique_ptr<distributed::StreamMark>> spare;
  bool followed = false;  ///< see look_later()
};

struct WatchedGroup;
using WatchedGroupPtr = std::shared_ptr<WatchedGroup>;

struct WatchedGroup : std::enable_shared_from_this<WatchedGroup> {
  std::string name;  ///< among the groups that share a board; empty without a parent
  std::string group_name;
  std::string note;  ///< which ranks of the job these are, see note_on_ranks()
  int64_t pid = 0;   ///< of this process
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};   ///< of its collectives; 0: unknown
  std::chrono::milliseconds patience{0};  ///< with the store, and with other ranks
  std::shared_ptr<StoreClient> store;
  std::shared_ptr<StatusBoard> board;  ///< both are those of `parent`, if there is one
  WatchedGroupPtr parent;              ///< another group over the same ranks, see watch_with()
  CallLog calls;
  std::atomic<int64_t> exchanges{0};     ///< of batch norms, which number them
  std::atomic<int64_t> hooks_failed{0};  ///< times, on all ranks; see Note [Hooks that fail]
  std::atomic<int> waits{0};             ///< of this rank that take longer than usual; since when:
  std::atomic<std::chrono::steady_clock::time_point> waits_since{};
  std::atomic<bool> stalled{false};         ///< `stall` is not empty
  std::atomic<bool> told_elsewhere{false};  ///< on the board of stalls: that it does not wait
  std::atomic<bool> processes_read{false};
  std::atomic<bool> has_reports{false};  ///< that are over when this group is used again

  std::mutex mutex;                                   ///< guards what follows
  RankStatus status;                                  ///< of this rank, as it was posted
  std::vector<std::weak_ptr<WatchedGroup>> reported;  ///< see has_reports
  ReportKeys old_reports;                ///< see find_reports(); in the group that has the board
  std::map<int, ProcessName> processes;  ///< of other ranks
  Launched launched;
  std::string stall;    ///< the verdict that a rank has printed about this rank's last call
  Proof ended_first;    ///< seen when the store was lost
  std::string verdict;  ///< what report_failure() has found
  std::chrono::steady_clock::time_point verdict_until;  ///< it is not asked for again until then

  /// The group that has the store and the board.
  WatchedGroupPtr root() { return parent ? parent : shared_from_this(); }
  /// Of no other group that one process is in.
  const std::string& label() const { return name.empty() ? group_name : name; }
  Position position(bool in_hook = false);
  /// Changes the status of this rank, and posts it; does not wait for that.
  std::shared_future<void> report(const std::function<void(RankStatus&)>& change);
  /// What this rank has reported about `about` is over when this group is used again.
  void expect_more(const WatchedGroupPtr& about);
  void go_on();
  /// Of other ranks, in this group, and in those that share its board: but not what was found in an
  /// earlier failure of one of these.
  Findings find_reports();
  void remember_reports();
  bool has_failed();
  bool knows_processes();

  /// A key of the store, the same on all ranks; on the store's thread. At first this rank tells the
  /// others there which process it is. `what`: "status", "calls", "left" (ranks that have read the
  /// reports), "stall", or "process/HOST".
  std::string key(c10d::Store& shared, const std::string& what);

 private:
  std::string name_in_store_;  ///< the group's, and how often there was one; of the store's thread
};

/// To be added to messages that name ranks of `group`: which ranks of the job these are. Empty
/// where they are the same.
std::string note_on_ranks(const c10d::ProcessGroup& group);

/// What is known of `group`; at first this rank tells the others, through the store, which process
/// it is. Null for groups of one rank or without a store, and in a forked process.
WatchedGroupPtr watched(const c10d::ProcessGroup& group);

/// All that this process knows.
std::vector<WatchedGroupPtr> all_watched();

/// The same, or null where watched() has not been called.
WatchedGroupPtr find_watched(const c10d::ProcessGroup& group);

/// Who waits in `group` hears also of failures of `parent`, which has the same ranks. For groups
/// that nobody uses apart from it, as a failure of `parent` is one of `group` from then on. After a
/// first collective of `parent`, and before one of `group`.
/// `name`: of `group`, the same on all ranks, and of no other group that was made from `parent`.
void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name) noexcept;

/// Reads which process each rank of this host is, so that it is known when the store is lost. (Of
/// those on other hosts nothing could be seen, and to read them all would take every rank as long
/// as there are ranks.) After a first collective of the group. Returns at once if it was called
/// before.
void remember_processes(const c10d::ProcessGroup& group) noexcept;

/// The same, each time, and without waiting for it.
std::shared_future<void> read_processes(const WatchedGroupPtr& group);

/// Looks at the processes of this host: what has become of those that have ended or are stopped.
Proof look_around(WatchedGroup& group, std::optional<ProcessState> only = {});

/// Notes that this process has made `group`.
void made_here(const c10d::ProcessGroup& group);

/// @throws Error in a process that was forked since the group was made, where made_here() was
/// called, or else since it was used for the first time: it would read and write the connections of
/// its parent, and wait for threads that it does not have.
void require_own_process(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
