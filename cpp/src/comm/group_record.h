// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What this rank knows of each process group: its name in the store, the processes behind its
/// ranks, and what has become of it.

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/call_history.h"
#include "comm/notice_board.h"
#include "comm/process_state.h"

namespace apex::parallel {

struct GroupRecord;
using GroupRecordPtr = std::shared_ptr<GroupRecord>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct GroupRecord {
  std::string name;  ///< of the group, and how often there was one; the same on all ranks
  /// Not held: a store that outlives its group keeps its port.
  c10::weak_intrusive_ptr<c10d::Store> store{StorePtr()};
  int64_t pid = 0;  ///< of this process
  int rank = 0;
  int size = 1;
  CallHistory calls;

  std::mutex mutex;                      ///< guards what follows
  std::map<int, ProcessName> processes;  ///< of other ranks
  std::map<int, std::string>
      ended_first;      ///< seen when the store was lost: by rank, what look_around() says
  std::string verdict;  ///< what report_failure() has found
  std::chrono::steady_clock::time_point verdict_until;  ///< it is not asked for again until then

  std::atomic<int64_t> exchanges{0};   ///< of batch norms, which number them
  std::atomic<bool> asked{false};      ///< for the processes
  std::atomic<bool> announced{false};  ///< a failure, without a collective
  std::atomic<bool> reported_from_elsewhere{false};
  std::atomic<int64_t> hooks_failed{0};  ///< times, on all ranks; see Note [Hooks that fail]
  GroupRecordPtr heard_too;              ///< another group, whose failures are this one's as well

  // Keys of the store.
  NoticeBoard process_board(const std::string& host) const;  ///< which process each of its ranks is
  NoticeBoard report_board() const;                          ///< of failures
  std::string count_key() const;                             ///< of failures of this group itself
  std::string refusal_key(int64_t call) const;  ///< a rank has refused the arguments of that call
  std::string farewell_key(int of_rank) const;
  NoticeBoard hook_board() const;  ///< of a hook that fails next

  /// How long a rank that waits for what others post waits between two looks.
  std::chrono::milliseconds between_looks() const;
};

/// The record of `group`; at first this rank tells the others, through the store, which process it
/// is. Null for groups of one rank or without a store.
GroupRecordPtr record_of(const c10d::ProcessGroup& group);

/// The same, or null where record_of() has not been called.
GroupRecordPtr find_record(const c10d::ProcessGroup& group);

/// Notes that this process has made `group`.
void made_here(const c10d::ProcessGroup& group);

/// @throws Error in a process that was forked since the group was made, where made_here() was
/// called, or else since it was used for the first time: it would read and write the connections of
/// its parent, and wait for threads that it does not have.
void require_own_process(const c10d::ProcessGroup& group);

/// How long the store and other ranks are waited for: an eighth of the timeout, between half a
/// second and five.
std::chrono::milliseconds patience_of(const c10d::ProcessGroup& group);

/// Runs `body(store)` with the group's store, and returns whether it has ended before patience
/// does; it is left behind then, so it must own what it uses.
bool talk_to_store(const c10d::ProcessGroup& group, const GroupRecord& record,
                   std::function<void(c10d::Store& store)> body);

/// A connection of its own, which is not shared with who may block in it; for stores that have
/// connections. (A file is removed when as many stores on it have ended as there are ranks, copies
/// included.)
StorePtr own_connection(const StorePtr& store);

/// Reads which process each other rank of this host is, as they have told. Of those on other hosts
/// nothing could be seen, and to read them all would take every rank as long as there are ranks.
void read_processes(c10d::Store& store, GroupRecord& record);

/// Looks at the processes of this host: what has become of those that have ended or are stopped, by
/// rank.
std::map<int, std::string> look_around(GroupRecord& record, std::optional<ProcessState> only = {});

}  // namespace apex::parallel
