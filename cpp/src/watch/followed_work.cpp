// SPDX-License-Identifier: BSD-3-Clause
#include "watch/followed_work.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "distributed/backends.h"
#include "torch_version.h"
#include "watch/forced_unwind.h"
#include "watch/notice.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using distributed::StreamMark;

/// Of the store's thread.
struct Pursuit {
  WatchedGroupPtr watched;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group{c10::intrusive_ptr<c10d::ProcessGroup>()};
  Launched::Call oldest;  ///< whose mark was not reached at the last look
  std::optional<Wait> wait;
  std::optional<StallWatch> stall;
  Clock::time_point ended_at;  ///< when it was seen that a process has ended
};

/// On a thread of its own: both wait for others.
void give_up(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) {
  const std::string found = report_failure(*group, what);
  notify(
      "rank " + std::to_string(group->getRank()) + " of " + std::to_string(group->getSize()) +
      ": " + what + " does not end" + found +
      ". The communicator is aborted, so that this process does not wait for the timeout. What the "
      "GPU has received since, as gradients, is worth nothing: do not save it. The next collective "
      "of this group raises an error.");
  std::set<c10d::Backend*> aborted;
  for (const c10::Device& device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (!detail::is_nccl(backend->getBackendName()) || !aborted.insert(backend.get()).second)
      continue;
    backend->abort();
  }
}

/// Whether `pursuit` goes on, and when.
std::optional<std::chrono::milliseconds> look(Pursuit& pursuit) {
  const auto now = Clock::now();
  WatchedGroup& watched = *pursuit.watched;
  if (!pursuit.oldest.mark || pursuit.oldest.mark->reached()) {
    pursuit.wait.reset();
    pursuit.stall.reset();
    pursuit.ended_at = {};
    const std::lock_guard<std::mutex> lock(watched.mutex);
    if (pursuit.oldest.mark) watched.launched.spare = std::move(pursuit.oldest.mark);
    pursuit.oldest = std::move(watched.launched.last);
    if (pursuit.oldest.mark) return timing::kUnfinished;
    watched.launched.followed = false;
    return std::nullopt;
  }
  const auto group = pursuit.group.lock();
  if (!group) return std::nullopt;
  if (!pursuit.wait) {
    pursuit.wait.emplace(*group, Wait::kOnDevice);
    pursuit.stall.emplace(pursuit.watched, pursuit.oldest.number, pursuit.oldest.what);
  }
  pursuit.stall->poll();
  const bool failed = pursuit.wait->poll().kind != Verdict::kOk;
  if (pursuit.ended_at == Clock::time_point() &&
      !look_around(watched, ProcessState::kEnded).empty())
    pursuit.ended_at = now;
  const bool ended =
      pursuit.ended_at != Clock::time_point() && now - pursuit.ended_at > timing::kAlone;
  if (!failed && !ended) return timing::kNeighbours;
  std::thread([group, what = pursuit.oldest.what] {
    try {
      give_up(group, what);
    } catch (APEX_FORCED_UNWIND) {
      throw;
    } catch (const std::exception& error) {
      notify(std::string("the communicator could not be aborted: ") + error.what());
    }
  }).detach();
  return std::nullopt;  // still `followed`, so it is not looked at again
}

void look_later(const std::shared_ptr<Pursuit>& pursuit, std::chrono::milliseconds time) {
  pursuit->watched->store->thread().run(
      [pursuit] {
        try {
          if (const auto next = look(*pursuit)) look_later(pursuit, *next);
        } catch (APEX_FORCED_UNWIND) {
          throw;
        } catch (...) {
          // The group was shut down meanwhile, or memory has run out.
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
    mark = std::move(launched.spare);
  }
  if (!mark) mark = distributed::make_stream_mark();
  // Without the lock: it blocks where a GPU that waits has been given all that it takes.
  if (!mark || !mark->set()) return;
  {
    const std::lock_guard<std::mutex> lock(watched->mutex);
    if (launched.last.mark) launched.spare = std::move(launched.last.mark);
    launched.last = {std::move(mark), watched->calls.last_number(), what};
    if (std::exchange(launched.followed, true)) return;
  }
  auto pursuit = std::make_shared<Pursuit>();
  pursuit->watched = watched;
  pursuit->group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(
      c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(
          const_cast<c10d::ProcessGroup*>(&group)));
  look_later(pursuit, timing::kUnfinished);
} catch (...) {
  // As without it, torch's watchdog ends the process after the timeout.
}

}  // namespace apex::parallel
