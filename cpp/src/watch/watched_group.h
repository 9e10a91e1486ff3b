// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// This process's knowledge of each process group: its last calls, and what its ranks report.

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "watch/board.h"
#include "watch/process_state.h"
#include "watch/record.h"

namespace apex::parallel {

/// A collective over NCCL that this rank has launched; see Note [Stalls].
struct Launched {
  c10::intrusive_ptr<c10d::Work> work;
  int64_t number = 0;
  std::string what;
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
  bool asked = false;              ///< a rank may have reported a stall of the last call
  std::string difference;          ///< to the calls of another rank, if they are apart
  Launched launched;               ///< the last one

  // Used on the board's thread, see watch_waits():
  Launched on_gpu;                   ///< the GPU waits for it
  Clock::time_point on_gpu_since;    ///< when that was first seen
  Clock::time_point since;           ///< when the watched wait began
  std::chrono::milliseconds due{0};  ///< time from then to the next report
  int64_t number_of_question = 0;    ///< posted before that; 0: not yet

  std::mutex attaching;            ///< guards attached
  std::shared_ptr<void> attached;  ///< the result of host_backend_of()
};

using WatchedGroupPtr = std::shared_ptr<WatchedGroup>;

/// A note for messages that name ranks of `group`: these ranks' numbers in the job. Empty if the
/// numbers are the same.
std::string note_on_ranks(const c10d::ProcessGroup& group);

/// The entry of `group`, made by the first call. Null for groups of one rank or without a store,
/// and in a forked process. Does not wait for the store.
WatchedGroupPtr watched(const c10d::ProcessGroup& group);

/// All groups that this process watches.
std::vector<WatchedGroupPtr> all_watched();

/// Drops the entries of groups that no longer exist, and with them connections to the store.
void forget_destroyed_groups();

/// Looks for news of all groups now.
void look_at_boards();

/// Like watched(), but null if watched() was not called before.
WatchedGroupPtr find_watched(const c10d::ProcessGroup& group);

/// From now on `group` is a channel of `parent`, which has the same ranks. Call it before the first
/// collective of `group`.
/// `name` must be the same on all ranks, and unique among groups made from `parent`.
void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name);

/// From now on the processes of the ranks on this host are watched. `processes`: of all ranks.
void remember_processes(const c10d::ProcessGroup& group, const std::vector<ProcessName>& processes);

/// @throws Error in a process that was forked after the group was first watched. The child would
/// use
///         its parent's connections, and wait for threads that do not exist there.
void require_own_process(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
