// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// This process's knowledge of each process group: its last calls, and what the ranks report to
/// each other through the group's store.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "watch/process_state.h"
#include "watch/record.h"

namespace apex::parallel {

// Note [Calls of the store]
//
// A call blocks while the process that hosts the store is stopped, and for long on a loaded host.
// So only the watching thread of the process makes calls, see Note [The watching thread], and no
// other thread waits for it, except for the report of a failure. It clones the store, which
// connects to the server, since destroy_process_group() must end the job's store, which frees its
// port. After an error the store is lost: no call is made twice, and torch logs every call of a
// lost store.
//
// Failures are appended to one key, since with a key for each rank N ranks would make N^2 requests.
// A rank that is in no collective looks for news of one group every kIdle; reports of a rank on the
// same host wake it at once. Stores that cannot append, such as a FileStore, carry no reports.

/// One rank's view of a group's reports; the groups made from it share it. Thread safe.
class Board {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param timeout  of the group's collectives; 0: unknown.
  Board(const c10d::ProcessGroup& group, std::chrono::milliseconds timeout);
  ~Board();

  const std::string group_name;
  const int rank;
  const int size;
  const std::chrono::milliseconds timeout;
  const std::chrono::milliseconds patience;  ///< see report_failure()
  const bool has_store;

  // --- failures ---

  /// Reports that a collective of the group has failed on this rank, or more proof. Does not wait.
  void report(const RankRecord& failure);
  bool has_failed() const { return has_failed_; }
  /// As last read.
  RankRecords reports();

  // --- processes of this host's ranks ---

  void add_processes(std::map<int, ProcessName> found);
  std::map<int, ProcessName> processes();
  /// Those that have exited or are stopped.
  Proof look_around(std::optional<ProcessState> only = {});

  // --- looking for news ---

  /// Looks for news now if the last look is older.
  void look_if_older(std::chrono::milliseconds age);
  /// Whether the store has answered a look that began after `time`.
  bool answered_since(Clock::time_point time) const { return answered_.load() >= time; }
  /// Whether the store has raised an error.
  bool is_lost() const { return is_lost_; }
  /// Blocks until there may be news, or `until`.
  void wait_for_news(Clock::time_point until);
  /// Blocks until this rank's reports are posted, or `until`.
  void wait_for_posts(Clock::time_point until);

  // --- on the watching thread ---

  /// Publishes this rank's process and reports, looks for news, answers, and watches waits.
  void step();
  /// Asks all ranks for their positions. Returns how often ranks have asked.
  int64_t ask();
  /// The last position of `rank`, if it has published one.
  std::optional<RankRecord> position_of(int rank);

  /// Result of report_failure().
  std::mutex verdict_mutex;
  std::optional<std::string> verdict;

 private:
  /// A key of the store, the same on all ranks.
  std::string key(const std::string& what) const { return "apex/" + what + '/' + name_; }
  void call_store();
  void introduce();
  void read_news();
  void publish();
  void find_processes();
  void wake();

  std::atomic<bool> has_failed_{false}, is_lost_{false};
  std::atomic<Clock::time_point> answered_{Clock::time_point()};

  // Used on the watching thread:
  c10::intrusive_ptr<c10d::Store> given_, store_;
  std::string name_;  ///< group name and instance number
  int64_t seen_ = 0, asked_ = 0;
  bool elsewhere_ = false;  ///< has answered that it is in no collective; its next wait corrects it

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  std::deque<std::string> unsent_;
  Clock::time_point looked_, look_at_;
  RankRecords reports_;
  std::map<int, ProcessName> processes_;
};

/// Keeps the process that usually hosts the store for some time after it has reported a failure, so
/// that other ranks can read the report. Called at its end.
void stay_for_readers();

/// A wait of this rank; see Note [Stalls].
struct Watched {
  Board::Clock::time_point since;
  int64_t call = 0;
  std::string what;
  c10::intrusive_ptr<c10d::Work> work;  ///< the GPU waits for it; null: the host waits
};

class Wait;

/// A channel; see Note [Channels].
struct WatchedGroup {
  using Clock = std::chrono::steady_clock;

  std::string channel;           ///< its name, which no other group of this process has
  std::string note;              ///< the ranks' numbers in the job, see note_on_ranks()
  int64_t pid = this_pid();      ///< process that created this object
  std::shared_ptr<Board> board;  ///< shared by all channels of a group

  std::mutex mutex;  ///< guards what follows
  CallLog calls;
  Clock::time_point began;         ///< when the last call began
  std::vector<const Wait*> waits;  ///< of this rank's threads, the oldest first
  std::string difference;          ///< to the calls of another rank, if they are apart
  std::string stall;               ///< the last stall report that this rank has printed
  Watched launched;                ///< the last collective that the host does not wait for

  // Used on the watching thread, see watch_waits():
  Watched on_gpu;                    ///< an earlier one, until it has completed
  Clock::time_point since;           ///< when the watched wait began
  std::chrono::milliseconds due{0};  ///< time from then to the next report
  int64_t number_of_question = 0;    ///< posted before that, at `asked`; 0: not yet
  Clock::time_point asked;

  std::mutex attaching;            ///< guards attached
  std::shared_ptr<void> attached;  ///< the result of host_backend_of()
};

using WatchedGroupPtr = std::shared_ptr<WatchedGroup>;

/// A note for messages that name ranks of `group`: these ranks' numbers in the job. Empty if the
/// numbers are the same.
std::string note_on_ranks(const c10d::ProcessGroup& group);

/// The entry of `group`, made by the first call. Null for groups of one rank or without a store,
/// and in a forked process. Does not wait for the store. `parent`: see watch_with().
WatchedGroupPtr watched(const c10d::ProcessGroup& group, const WatchedGroupPtr& parent = nullptr,
                        const std::string& name = {});

/// All groups that this process watches.
std::vector<WatchedGroupPtr> all_watched();

/// Since when a thread waits in a channel of `board`.
std::optional<Board::Clock::time_point> waiting_since(const Board& board);

/// On the watching thread: a step of each board.
void step_boards();

/// Like watched(), but null if watched() was not called before.
WatchedGroupPtr find_watched(const c10d::ProcessGroup& group);

/// From now on `group` is a channel of `parent`, which has the same ranks. Call it before the first
/// collective of `group`.
/// `name` must be the same on all ranks, and unique among groups made from `parent`.
void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name);

/// From now on the processes of the ranks on this host are watched. `processes`: of all ranks.
void remember_processes(const c10d::ProcessGroup& group, const std::vector<ProcessName>& processes);

/// @throws Error in a process that was forked after the group was first watched: it would use its
/// parent's connections, and wait for threads that do not exist there.
void require_own_process(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
