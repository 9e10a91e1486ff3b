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
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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
  const int wakes = make_socket();  ///< see wake_process()
};

Neighbours& neighbours() {
  static auto* const mutex = new std::mutex;
  static auto* const by_process = new std::map<int64_t, Neighbours>;
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*by_process)[this_pid()];
}

std::atomic<bool> some_failed{false};  ///< a process has ended with an error

/// Wakes the thread of `process`: there may be news of its groups, or it has another neighbour.
void wake(const Neighbours& state, const ProcessName& process) {
  sockaddr_un address;
  const socklen_t length = address_of(process, address);
  static_cast<void>(::sendto(state.wakes, "", 1, MSG_NOSIGNAL,
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
    for (const auto& [rank, process] : group->board->processes()) {
      for (Neighbour& one : state.all) {
        if (one.outcome.empty() || !(one.process == process)) continue;
        ended += (ended.empty() ? "rank " : ", rank ") + std::to_string(rank) +
                 " has ended (process " + std::to_string(process.pid) + ", " + one.outcome + ")";
        one.outcome.clear();
      }
    }
    if (ended.empty()) continue;
    return "rank " + std::to_string(group->board->rank) + " of " +
           std::to_string(group->board->size) + ": " + ended + group->note +
           ", while this rank waits in: " + what;
  }
  return {};
}

/// Polls until the process exits.
void loop(Neighbours& state) {
  std::vector<pollfd> fds;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      fds.assign({{state.wakes, POLLIN, 0}});
      for (const Neighbour& one : state.all) fds.push_back({one.fd, POLLIN, 0});
    }
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    for (char byte = 0; ::recv(state.wakes, &byte, sizeof(byte), 0) >= 0;) continue;
    if (fds[0].revents != 0) look_at_boards();
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      for (size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        Neighbour& one = state.all[i - 1];
        one.outcome = outcome_of(one.process, one.fd);
        if (!one.outcome.empty()) some_failed = true;
        ::close(std::exchange(one.fd, -1));
      }
    }
    report_ended_processes();
  }
}

}  // namespace

void watch_process(const ProcessName& process) {
  const auto self = this_process();
  if (!self || self->host != process.host || self->pid == process.pid) return;
  Neighbours& state = neighbours();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto is_same = [&](const Neighbour& one) { return one.process == process; };
  if (std::any_of(state.all.begin(), state.all.end(), is_same)) return;
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
  if (fd < 0) return;  // it has ended already, or the kernel is older than 5.3
  state.all.push_back({process, fd, {}});
  wake(state, *self);
}

void listen_to_neighbours() {
  Neighbours& state = neighbours();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (std::exchange(state.started, true)) return;
  std::thread([&state] { loop(state); }).detach();
}

void wake_process(const ProcessName& process) {
  const auto self = this_process();
  if (!self || self->host != process.host) return;
  if (self->pid == process.pid) return look_at_boards();  // ranks are threads
  wake(neighbours(), process);
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
  std::string rank, job;
};

FromLauncher from_launcher(const std::string& pid) {
  std::ifstream environment("/proc/" + pid + "/environ");
  FromLauncher result;
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry.rfind("RANK=", 0) == 0) result.rank = entry.substr(5);
    for (const char* name : {"MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_RUN_ID=", "WORLD_SIZE="})
      if (entry.rfind(name, 0) == 0) result.job += entry + '\n';
  }
  return result;
}

}  // namespace

std::map<int, ProcessName> launched_ranks() noexcept try {
  static auto* const mutex = new std::mutex;
  static auto* const ranks = new std::map<int, ProcessName>;
  const std::lock_guard<std::mutex> lock(*mutex);
  const FromLauncher own = from_launcher("self");
  if (own.rank.empty()) return *ranks;
  std::error_code error;
  const std::string parent = "/proc/" + std::to_string(::getppid()) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(parent, error)) {
    std::ifstream children(task.path() / "children");
    for (int64_t pid = 0; children >> pid;) {
      // The parent may have started other jobs as well.
      const FromLauncher other = from_launcher(std::to_string(pid));
      if (other.rank.empty() || other.job != own.job) continue;
      const auto process = process_of(pid);
      if (!process) continue;
      ranks->emplace(std::atoi(other.rank.c_str()), *process);
      watch_process(*process);
    }
  }
  return *ranks;
} catch (...) {
  return {};  // a process has ended meanwhile
}

namespace {

/// When the library is loaded, all ranks are still there.
[[maybe_unused]] const bool kRead = (launched_ranks(), true);

}  // namespace

}  // namespace apex::parallel
