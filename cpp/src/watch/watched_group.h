// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// This process's knowledge of each process group: its name in the store, the processes of its
/// ranks, and the ranks' reports.

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "watch/call_log.h"
#include "watch/process_state.h"
#include "watch/status_board.h"

namespace apex::parallel {

/// The last collective over NCCL that this rank has launched; see Note [Stalls].
struct Launched {
  c10::intrusive_ptr<c10d::Work> work;
  int64_t number = 0;
  std::string what;
};

struct WatchedGroup;
using WatchedGroupPtr = std::shared_ptr<WatchedGroup>;

struct WatchedGroup : std::enable_shared_from_this<WatchedGroup> {
  std::string name;  ///< unique among groups that share a board; empty without a parent
  std::string group_name;
  std::string note;  ///< the ranks' numbers in the job, see note_on_ranks()
  int64_t pid = 0;   ///< process that created this object
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};   ///< timeout of its collectives; 0: unknown
  std::chrono::milliseconds patience{0};  ///< how long to wait for the store and for other ranks
  std::shared_ptr<StoreClient> store;
  std::shared_ptr<StatusBoard> board;  ///< store and board are the parent's if there is one
  WatchedGroupPtr parent;              ///< another group over the same ranks, see watch_with()
  CallLog calls;
  std::atomic<int64_t> exchanges{0};  ///< number of batch-norm exchanges
  std::atomic<int> waits{0};          ///< waits that take longer than usual; began at:
  std::atomic<std::chrono::steady_clock::time_point> waits_since;
  std::atomic<bool> announced{false};  ///< counted as a reader of the reports: see leave_store()
  std::atomic<bool> stalled{false};    ///< `stall` is not empty
  std::atomic<bool> reported_elsewhere{
      false};  ///< the stall board says that this rank does not wait
  std::atomic<bool> processes_read{false};

  std::mutex mutex;                      ///< guards what follows
  std::optional<RankStatus> failure;     ///< this rank's, as posted; only in root()
  std::map<int, ProcessName> processes;  ///< processes of other ranks; only in root()
  Launched launched;
  std::string stall;    ///< a printed verdict about this rank's last call
  Proof ended_first;    ///< processes seen exited when the store was lost; only in root()
  std::string verdict;  ///< result of report_failure()
  std::chrono::steady_clock::time_point verdict_until;  ///< the result is reused until then

  /// The group that owns the store, the board, the processes and this rank's failure.
  WatchedGroupPtr root() { return parent ? parent : shared_from_this(); }
  /// A name that no other group of this process has.
  const std::string& label() const { return name.empty() ? group_name : name; }
  /// Posts a failure of this group, which is root(), without waiting.
  std::shared_future<void> report(RankStatus status);
  bool knows_processes();

  /// A key of the store, the same on all ranks; used on the store's thread. The first call also
  /// publishes this rank's process. `what`: "status", "calls", "left" (number of ranks that have
  /// read the reports), "stall", or "process/HOST".
  std::string key(c10d::Store& shared, const std::string& what);

 private:
  std::string name_in_store_;  ///< group name and instance number; used on the store's thread
  bool introduced_ = false;    ///< the process is published; used on the store's thread
};

/// A note for messages that name ranks of `group`: these ranks' numbers in the job. Empty if the
/// numbers are the same.
std::string note_on_ranks(const c10d::ProcessGroup& group);

/// The entry of `group`. The first call publishes this rank's process through the store. Null for
/// groups of one rank or without a store, and in a forked process.
WatchedGroupPtr watched(const c10d::ProcessGroup& group);

/// All groups that this process watches.
std::vector<WatchedGroupPtr> all_watched();

/// Like watched(), but null if watched() was not called before.
WatchedGroupPtr find_watched(const c10d::ProcessGroup& group);

/// From now on `group` and `parent`, which has the same ranks, fail together. Call it after a first
/// collective of `parent` and before one of `group`.
/// `name` must be the same on all ranks, and unique among groups made from `parent`.
void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name) noexcept;

/// Reads the processes of the ranks on this host, so that they are known if the store is lost.
/// Processes on other hosts cannot be observed, and reading all of them would take time
/// proportional to the number of ranks. Call it after a first collective of the group. Later calls
/// return immediately.
void remember_processes(const c10d::ProcessGroup& group) noexcept;

/// The same, but reads on every call, and does not wait.
std::shared_future<void> read_processes(const WatchedGroupPtr& root);

/// The known processes of this host's other ranks, by rank.
std::map<int, ProcessName> processes_of(WatchedGroup& group);

/// Checks the processes of this host; returns those that have exited or are stopped.
Proof look_around(WatchedGroup& group, std::optional<ProcessState> only = {});

/// Records that this process has created `group`.
void made_here(const c10d::ProcessGroup& group);

/// @throws Error in a process that was forked after made_here(), or else after the first use of the
///         group. The child would use its parent's connections, and wait for threads that do not
///         exist there.
void require_own_process(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
