// SPDX-License-Identifier: BSD-3-Clause
#include "watch/followed_work.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "comm/error_text.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "watch/forced_unwind.h"
#include "watch/job_thread.h"
#include "watch/notice.h"
#include "watch/process_state.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using distributed::StreamMark;

/// A group's unfinished collectives; used on looking_thread().
struct Pursuit {
  WatchedGroupPtr watched;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group{c10::intrusive_ptr<c10d::ProcessGroup>()};
  std::deque<Launched::Call> calls;  ///< calls whose marks were not reached at the last check
  std::optional<Wait> wait;
  std::optional<StallWatch> stall;
  Clock::time_point ended_at;  ///< when a process was first seen to have exited
};

/// The checking thread of this process. It is not the store's thread, which blocks while the
/// process that hosts the store is stopped. Never destroyed, since it may be running when the
/// process exits.
JobThread& looking_thread() {
  static auto* const mutex = new std::mutex;
  static JobThread* thread = nullptr;
  static int64_t pid = 0;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (thread == nullptr || pid != this_pid()) {
    thread = new JobThread;
    pid = this_pid();
  }
  return *thread;
}

void add(Launched& launched, Launched::Call call) {
  std::deque<Launched::Call>& calls = launched.calls;
  if (launched.count++ % launched.every == 0) {
    calls.push_back(std::move(call));
  } else {
    launched.spare.push_back(std::exchange(calls.back(), std::move(call)).mark);
  }
  if (calls.size() < Launched::kMarks || launched.count % launched.every != 0) return;
  launched.every *= 2;
  for (size_t i = 0; i < Launched::kMarks / 2; ++i) {
    launched.spare.push_back(std::move(calls[2 * i].mark));
    calls[i] = std::move(calls[2 * i + 1]);
  }
  calls.resize(Launched::kMarks / 2);
}

/// Takes the calls that add() has kept.
std::deque<Launched::Call> take_calls(Launched& launched) {
  launched.count = 0;
  launched.every = 1;
  return std::exchange(launched.calls, {});
}

/// Runs on a separate thread, because both steps wait for other ranks.
void give_up(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) {
  const std::string found = report_failure(*group, what);
  notify(
      "rank " + std::to_string(group->getRank()) + " of " + std::to_string(group->getSize()) +
      ": " + what + " does not complete" + found + note_on_ranks(*group) +
      ". The communicator is aborted, so that this process does not wait for the timeout. "
      "Gradients that the GPU has received since then are invalid: do not save a checkpoint. The "
      "next collective of this group raises an error.");
  std::set<c10d::Backend*> aborted;
  for (const c10::Device& device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (!detail::is_nccl(backend->getBackendName()) || !aborted.insert(backend.get()).second)
      continue;
    backend->abort();
  }
}

/// Removes completed calls from `pursuit`, then adds calls launched since. Returns whether it
/// removed or added a call.
bool goes_on(Pursuit& pursuit) {
  std::vector<std::unique_ptr<StreamMark>> reached;
  while (!pursuit.calls.empty() && pursuit.calls.front().mark->reached()) {
    reached.push_back(std::move(pursuit.calls.front().mark));
    pursuit.calls.pop_front();
  }
  if (reached.empty() && !pursuit.calls.empty()) return false;
  pursuit.wait.reset();
  pursuit.stall.reset();
  pursuit.ended_at = {};
  const std::lock_guard<std::mutex> lock(pursuit.watched->mutex);
  Launched& launched = pursuit.watched->launched;
  for (auto& mark : reached) launched.spare.push_back(std::move(mark));
  if (!pursuit.calls.empty()) return true;
  pursuit.calls = take_calls(launched);
  launched.followed = !pursuit.calls.empty();
  return true;
}

/// Returns the time until the next check, or nullopt to stop following.
std::optional<std::chrono::milliseconds> look(Pursuit& pursuit) {
  const auto now = Clock::now();
  WatchedGroup& watched = *pursuit.watched;
  if (goes_on(pursuit))
    return pursuit.calls.empty() ? std::nullopt : std::optional(timing::kUnfinished);
  const Launched::Call& oldest = pursuit.calls.front();
  const auto group = pursuit.group.lock();
  if (!group) return std::nullopt;
  if (!pursuit.wait) {
    // Other ranks may not have published their processes before.
    read_processes(pursuit.watched);
    pursuit.wait.emplace(*group, oldest.number);
    pursuit.stall.emplace(pursuit.watched, oldest.number, oldest.what);
  }
  pursuit.stall->poll();
  const bool failed = pursuit.wait->poll().kind != Verdict::kOk;
  if (pursuit.ended_at == Clock::time_point() &&
      !look_around(watched, ProcessState::kEnded).empty())
    pursuit.ended_at = now;
  const bool ended =
      pursuit.ended_at != Clock::time_point() && now - pursuit.ended_at > timing::kAlone;
  if (!failed && !ended) return timing::kNeighbours;
  std::thread([group, what = oldest.what] {
    try {
      give_up(group, what);
    } catch (APEX_FORCED_UNWIND) {
      throw;
    } catch (...) {
      notify("the communicator could not be aborted: " + message_of(std::current_exception()));
    }
  }).detach();
  return std::nullopt;  // `followed` stays set, so nothing checks this group again
}

void look_later(const std::shared_ptr<Pursuit>& pursuit, std::chrono::milliseconds time) {
  looking_thread().run(
      [pursuit] {
        try {
          if (const auto next = look(*pursuit)) look_later(pursuit, *next);
        } catch (APEX_FORCED_UNWIND) {
          throw;
        } catch (...) {
          // The group was shut down meanwhile, or memory is exhausted. The next call is followed
          // again.
          const std::lock_guard<std::mutex> lock(pursuit->watched->mutex);
          take_calls(pursuit->watched->launched);
          pursuit->watched->launched.followed = false;
        }
      },
      Clock::now() + time);
}

}  // namespace

void follow_work(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr watched = find_watched(group);
  if (!watched) return;
  Launched& launched = watched->launched;
  std::unique_ptr<StreamMark> mark;
  {
    const std::lock_guard<std::mutex> lock(watched->mutex);
    if (!launched.spare.empty()) {
      mark = std::move(launched.spare.back());
      launched.spare.pop_back();
    }
  }
  if (!mark) mark = distributed::make_stream_mark();
  // Without the lock: set() blocks if the queue of a waiting GPU is full.
  if (!mark || !mark->set()) return;
  {
    const std::lock_guard<std::mutex> lock(watched->mutex);
    add(launched, {std::move(mark), watched->calls.last_number(), what});
    if (std::exchange(launched.followed, true)) return;
  }
  auto pursuit = std::make_shared<Pursuit>();
  pursuit->watched = watched;
  pursuit->group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(
      c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(
          const_cast<c10d::ProcessGroup*>(&group)));
  look_later(pursuit, timing::kUnfinished);
} catch (...) {
  // Not followed: torch's watchdog ends the process after the timeout.
}

}  // namespace apex::parallel
