// SPDX-License-Identifier: BSD-3-Clause
#include "watch/neighbours.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plain_text.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;

struct Neighbour {
  ProcessName process;
  int fd = -1;          ///< its pidfd; -1 once it has ended
  std::string outcome;  ///< "signal 9", "exit code 1"; empty while it runs, and for exit code 0
};

/// The address of the datagram socket that wakes `process`, in the abstract namespace.
socklen_t address_of(const ProcessName& process, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name =
      "apex/" + std::to_string(process.pid) + '/' + std::to_string(process.start_time);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int make_socket() {
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const auto self = this_process();
  sockaddr_un address;
  if (self)
    static_cast<void>(
        ::bind(fd, reinterpret_cast<sockaddr*>(&address), address_of(*self, address)) == 0);
  return fd;
}

/// State of the process. Never destroyed, since the thread is not joined. A forked child has no
/// such thread, and begins with none of the parent's neighbours.
struct Neighbours {
  std::mutex mutex;  ///< guards the rest
  std::vector<Neighbour> all;
  std::optional<Clock::time_point> printed;
  bool started = false;             ///< the thread
  const int wakes = make_socket();  ///< see wake_watcher()
};

Neighbours& neighbours() {
  static auto* const mutex = new std::mutex;
  static auto* const by_process = new std::map<int64_t, Neighbours>;
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*by_process)[this_pid()];
}

std::atomic<bool> some_failed{false};  ///< a process has ended with an error

/// Wakes the thread of `process`; `news`: so that it looks for news.
void wake(const ProcessName& process, bool news) {
  sockaddr_un address;
  const socklen_t length = address_of(process, address);
  static_cast<void>(::sendto(neighbours().wakes, &news, sizeof(news), MSG_NOSIGNAL,
                             reinterpret_cast<sockaddr*>(&address), length) >= 0);
}

/// The line about the first wait in a group of a process that has ended with an error, which is
/// found only once. Requires the mutex.
std::string find_line(Neighbours& state) {
  for (const WatchedGroupPtr& group : all_watched()) {
    std::unique_lock<std::mutex> lock(group->mutex);
    const std::string what = group->waits.empty() ? std::string() : group->waits.front()->what;
    lock.unlock();
    if (what.empty()) continue;
    std::string ended;
    const RankRecords reports = group->board->reports();
    for (const auto& [rank, process] : group->board->processes()) {
      for (Neighbour& one : state.all) {
        if (one.outcome.empty() || !(one.process == process)) continue;
        const std::string outcome = std::exchange(one.outcome, {});
        const auto report = reports.find(rank);
        if (report != reports.end() && report->second.cause.empty()) continue;  // for another's end
        ended += (ended.empty() ? "rank " : ", rank ") + std::to_string(rank) +
                 " has ended (process " + std::to_string(process.pid) + ", " + outcome + ")";
      }
    }
    if (ended.empty()) continue;
    return rank_of(group->board->rank, group->board->size) + ": " + ended +
           ", while this rank waits in: " + what + group->note;
  }
  return {};
}

/// Until the process exits.
void loop(Neighbours& state) {
  for (std::vector<pollfd> fds;; step_boards()) {
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      fds.assign({{state.wakes, POLLIN, 0}});
      for (const Neighbour& one : state.all) fds.push_back({one.fd, POLLIN, 0});
    }
    if (::poll(fds.data(), fds.size(), static_cast<int>(timing::kTick.count())) < 0) continue;
    bool news = false;
    for (bool more = false; ::recv(state.wakes, &more, sizeof(more), 0) >= 0;) news |= more;
    for (const WatchedGroupPtr& group : all_watched()) {
      if (news) group->board->look_if_older(std::chrono::milliseconds(0));
    }
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      for (size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        Neighbour& one = state.all[i - 1];
        one.outcome = outcome_of(one.process);
        if (!one.outcome.empty()) some_failed = true;
        ::close(std::exchange(one.fd, -1));
      }
    }
    report_ended_processes();
  }
}

}  // namespace

void start_watching() {
  Neighbours& state = neighbours();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.started) std::thread([&state] { loop(state); }).detach();
  state.started = true;
  wake_watcher();
}

void wake_watcher() {
  if (const auto self = this_process()) wake(*self, /*news=*/false);
}

void wake_process(const ProcessName& process) { wake(process, /*news=*/true); }

void watch_process(const ProcessName& process) {
  if (process.pid == this_pid()) return;
  Neighbours& state = neighbours();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto is_same = [&](const Neighbour& one) { return one.process == process; };
  if (std::any_of(state.all.begin(), state.all.end(), is_same)) return;
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
  if (fd < 0) return;  // it has ended already, or the kernel is older than 5.3
  state.all.push_back({process, fd, {}});
  wake_watcher();
}

void report_ended_processes() {
  if (!some_failed) return;
  Neighbours& state = neighbours();
  const auto now = Clock::now();
  std::string line;
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    line = find_line(state);
    if (line.empty() || (state.printed && now - *state.printed < timing::kFailsToo)) return;
    state.printed = now;
  }
  notify(line);
}

namespace {

/// What a launcher gave to a process when it started: its rank, and what all ranks of a job share.
struct FromLauncher {
  std::string rank, size, job;
};

FromLauncher from_launcher(const std::string& pid) {
  std::ifstream environment("/proc/" + pid + "/environ");
  FromLauncher result;
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry.rfind("RANK=", 0) == 0) result.rank = entry.substr(5);
    if (entry.rfind("WORLD_SIZE=", 0) == 0) result.size = entry.substr(11);
    for (const char* name : {"MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_RUN_ID="})
      if (entry.rfind(name, 0) == 0) result.job += entry + '\n';
  }
  return result;
}

/// Never destroyed.
struct LaunchedRanks {
  FromLauncher own = from_launcher("self");
  std::map<int, ProcessName> ranks;
};

const LaunchedRanks* read_launched() noexcept {
  auto* const read = new LaunchedRanks;
  const std::string parent = std::to_string(::getppid());
  std::ifstream children("/proc/" + parent + "/task/" + parent + "/children");
  for (int64_t pid = 0; !read->own.rank.empty() && children >> pid;) {
    // The parent may have started other jobs as well.
    const FromLauncher other = from_launcher(std::to_string(pid));
    if (other.rank.empty() || other.size != read->own.size || other.job != read->own.job) continue;
    if (const auto process = process_of(pid))
      read->ranks.emplace(std::atoi(other.rank.c_str()), *process);
  }
  return read;
}

/// Read when the library is loaded: all ranks are still there.
const LaunchedRanks* const launched = read_launched();

}  // namespace

std::map<int, ProcessName> launched_ranks(int rank, int size) {
  const FromLauncher& own = launched->own;
  const bool is_job = own.rank == std::to_string(rank) && own.size == std::to_string(size);
  return is_job ? launched->ranks : std::map<int, ProcessName>();
}

}  // namespace apex::parallel
