// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watched_group.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "by_group.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "watch/neighbours.h"
#include "watch/stall.h"
#include "watch/timing.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Never destroyed, since threads may outlive main().
struct Groups {
  std::mutex introduction;  ///< held while a rank publishes its process, which waits for the store
  std::mutex mutex;         ///< guards what follows
  ByGroup<WatchedGroupPtr> by_group;
  ByGroup<int64_t> makers;  ///< the process that created each group
};

Groups& groups() {
  static auto* const instance = new Groups;
  return *instance;
}

milliseconds timeout_of(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (!detail::has_backend(mutable_group, at::kCPU)) return milliseconds(0);
  return distributed::gloo_timeout(*mutable_group.getBackend(at::kCPU)).value_or(milliseconds(0));
}

/// The job's ranks of the ranks of `group`; empty if they are the same or unknown.
std::vector<uint64_t> global_ranks(const c10d::ProcessGroup& group) {
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (detail::has_backend(group, at::kCPU))
    return distributed::gloo_global_ranks(*mutable_group.getBackend(at::kCPU));
  if (!detail::has_backend(group, at::kCUDA)) return {};
  const auto backend = mutable_group.getBackend(at::kCUDA);
  if (!detail::is_nccl(backend->getBackendName())) return {};
  try {
    return backend->getBackendOptions()->global_ranks_in_group;
  } catch (...) {
    return {};  // not all NCCL backends have options
  }
}

/// The processes of the ranks of the whole job, as far as the launcher's environment names them.
std::map<int, ProcessName> launched_ranks_of(const WatchedGroup& group) {
  const auto is = [](const char* name, int value) {
    const char* const text = std::getenv(name);
    return text != nullptr && std::to_string(value) == text;
  };
  if (!is("RANK", group.rank) || !is("WORLD_SIZE", group.size)) return {};
  std::map<int, ProcessName> processes = launched_ranks();
  processes.erase(group.rank);
  return processes;
}

WatchedGroupPtr make_watched(const c10d::ProcessGroup& group, const WatchedGroupPtr& parent,
                             const std::string& name) {
  const auto made = std::make_shared<WatchedGroup>();
  made->channel = parent ? name : group.getGroupName();
  made->note = note_on_ranks(group);
  made->pid = this_pid();
  made->rank = group.getRank();
  made->size = group.getSize();
  made->timeout = timeout_of(group);
  if (parent) {
    made->board = parent->board;
    return made;
  }
  const milliseconds patience =
      made->timeout == milliseconds(0)
          ? timing::kMostPatience
          : std::clamp(made->timeout / 8, timing::kLeastPatience, timing::kMostPatience);
  made->board = std::make_shared<Board>(group, patience);
  made->board->add_processes(launched_ranks_of(*made));
  made->board->begin([weak = std::weak_ptr<Board>(made->board)] {
    const auto board = weak.lock();
    return board ? position(*board) : RankRecord();
  });
  listen_to_neighbours();
  return made;
}

/// Also finds an entry that the parent process made before a fork.
WatchedGroupPtr find_any(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  const WatchedGroupPtr* const found = groups().by_group.find(group);
  return found == nullptr ? nullptr : *found;
}

/// A forked process is not a rank: its posts would be taken for its parent's.
WatchedGroupPtr if_own(WatchedGroupPtr one) {
  return one && one->pid == this_pid() ? std::move(one) : nullptr;
}

}  // namespace

std::string note_on_ranks(const c10d::ProcessGroup& group) {
  const std::vector<uint64_t> ranks = global_ranks(group);
  bool same = true;
  std::string list;
  for (size_t i = 0; i < ranks.size(); ++i) {
    same = same && ranks[i] == i;
    list += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (same) return {};
  return "; these are ranks within the group, which consists of ranks " + list + " of the job";
}

WatchedGroupPtr find_watched(const c10d::ProcessGroup& group) { return if_own(find_any(group)); }

namespace {

WatchedGroupPtr find_or_make(const c10d::ProcessGroup& group, const WatchedGroupPtr& parent = {},
                             const std::string& name = {}) {
  if (group.getSize() == 1) return nullptr;
  if (auto one = find_any(group)) return if_own(std::move(one));
  if (!group.getStore()) return nullptr;
  const std::lock_guard<std::mutex> introduction(groups().introduction);
  if (auto one = find_any(group)) return if_own(std::move(one));
  WatchedGroupPtr one = make_watched(group, parent, name);
  std::vector<WatchedGroupPtr> gone;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(groups().mutex);
  gone = groups().by_group.take_gone();
  groups().by_group.put(group, one);
  return one;
}

}  // namespace

WatchedGroupPtr watched(const c10d::ProcessGroup& group) { return find_or_make(group); }

std::vector<WatchedGroupPtr> all_watched() {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  return groups().by_group.values();
}

void look_at_boards() {
  std::set<std::shared_ptr<Board>> boards;
  for (const WatchedGroupPtr& group : all_watched()) boards.insert(group->board);
  for (const auto& board : boards) board->look_now();
}

void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name) noexcept try {
  if (&group == &parent) return;
  const WatchedGroupPtr known = watched(parent);
  if (known) find_or_make(group, known, name);
} catch (...) {
  // A collective that fails reports the problem with the store.
}

void remember_processes(const c10d::ProcessGroup& group) noexcept try {
  const WatchedGroupPtr known = watched(group);
  if (!known) return;
  Board& board = *known->board;
  if (!board.processes_read.exchange(true))
    board.read_processes().wait_until(Clock::now() + board.patience);
} catch (...) {
  // A collective that fails reports the problem with the store.
}

void remember_processes(const c10d::ProcessGroup& group,
                        const std::vector<ProcessName>& processes) noexcept try {
  const auto self = this_process();
  const WatchedGroupPtr known = watched(group);
  if (!known || !self) return;
  std::map<int, ProcessName> here;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].host == self->host) here.emplace(static_cast<int>(rank), processes[rank]);
  }
  known->board->add_processes(std::move(here));
} catch (...) {
  // An error does not name the processes.
}

void made_here(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  groups().makers.take_gone();
  groups().makers.put(group, this_pid());
}

void require_own_process(const c10d::ProcessGroup& group) {
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    const WatchedGroupPtr* const one = groups().by_group.find(group);
    const int64_t* const maker = groups().makers.find(group);
    if ((maker == nullptr || *maker == this_pid()) && (one == nullptr || (*one)->pid == this_pid()))
      return;
  }
  throw_forked();
}

}  // namespace apex::parallel
