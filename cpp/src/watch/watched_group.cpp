// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watched_group.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "by_group.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "watch/neighbours.h"
#include "watch/timing.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Never destroyed, since threads may outlive main().
struct Groups {
  std::mutex mutex;  ///< guards what follows
  ByGroup<WatchedGroupPtr> by_group;
};

Groups& groups() {
  static auto* const instance = new Groups;
  return *instance;
}

/// The options of the backend for the CPU, or else of NCCL; null for others.
c10::intrusive_ptr<c10d::Backend::Options> options_of(const c10d::ProcessGroup& given) {
  auto& group = const_cast<c10d::ProcessGroup&>(given);
  if (detail::has_backend(group, at::kCPU))
    return distributed::gloo_options(*group.getBackend(at::kCPU));
  if (!detail::has_backend(group, at::kCUDA)) return nullptr;
  try {
    return group.getBackend(at::kCUDA)->getBackendOptions();
  } catch (...) {
    return nullptr;  // not all backends have options
  }
}

/// Whether `board` is of all ranks of the job, according to the launcher's environment.
bool is_of_the_job(const Board& board) {
  const auto is = [](const char* name, int value) {
    const char* const text = std::getenv(name);
    return text != nullptr && std::to_string(value) == text;
  };
  return is("RANK", board.rank) && is("WORLD_SIZE", board.size);
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
  const auto options = options_of(group);
  const std::vector<uint64_t> ranks =
      options ? options->global_ranks_in_group : std::vector<uint64_t>();
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
  const auto one = std::make_shared<WatchedGroup>();
  one->channel = parent ? name : group.getGroupName();
  one->note = note_on_ranks(group);
  if (parent) {
    one->board = parent->board;
  } else {
    const auto options = options_of(group);
    one->board = Board::create(group, options ? options->timeout : milliseconds(0));
  }
  forget_destroyed_groups();
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    if (const WatchedGroupPtr* const other = groups().by_group.find(group)) return if_own(*other);
    if (!parent) one->board->begin();
    groups().by_group.put(group, one);
  }
  if (!parent && is_of_the_job(*one->board)) one->board->add_processes(launched_ranks());
  listen_to_neighbours();
  return one;
}

}  // namespace

WatchedGroupPtr watched(const c10d::ProcessGroup& group) { return find_or_make(group); }

std::vector<WatchedGroupPtr> all_watched() {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  return groups().by_group.values();
}

void forget_destroyed_groups() {
  std::vector<WatchedGroupPtr> gone;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(groups().mutex);
  gone = groups().by_group.take_gone();
}

void look_at_boards() {
  for (const WatchedGroupPtr& group : all_watched()) {
    std::unique_lock<std::mutex> lock(group->mutex);
    const bool waits = !group->waits.empty();
    lock.unlock();
    group->board->look_if_older(milliseconds(0), waits);
  }
}

void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name) {
  if (&group == &parent) return;
  if (const WatchedGroupPtr known = watched(parent)) find_or_make(group, known, name);
}

void remember_processes(const c10d::ProcessGroup& group,
                        const std::vector<ProcessName>& processes) {
  const auto self = this_process();
  const WatchedGroupPtr known = watched(group);
  if (!known || !self) return;
  std::map<int, ProcessName> here;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].host == self->host) here.emplace(static_cast<int>(rank), processes[rank]);
  }
  known->board->add_processes(std::move(here));
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  const std::lock_guard<std::mutex> lock(one->mutex);
  one->calls.add(what);
  one->began = Clock::now();
  one->asked = false;
} catch (...) {
  // A thread could not be created: an error of the collective names no other rank.
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->board->has_failed();
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what,
                      const std::string& cause) noexcept try {
  if (const WatchedGroupPtr one = watched(group))
    one->board->report(what, cause, {}).wait_for(timing::kForOthers);  // this process may end now
} catch (...) {
  // The other ranks wait until their timeout.
}

void require_own_process(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr one = find_any(group);
  if (one && one->pid != this_pid()) throw_forked();
}

}  // namespace apex::parallel
