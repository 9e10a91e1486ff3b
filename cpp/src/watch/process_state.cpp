// SPDX-License-Identifier: BSD-3-Clause
#include "watch/process_state.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include <apex/error.h>

namespace apex::parallel {

namespace {

struct Stat {
  char state = 0;
  uint64_t start_time = 0;
  int32_t status = 0;  ///< of a process that has ended, as from waitpid()
};

/// Reads fields 3, 22 and 52 of /proc/PID/stat, see proc(5). Field 2 is a name in parentheses that
/// may contain any character.
std::optional<Stat> read_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream in(text.substr(name_end + 1));
  const std::vector<std::string> fields{std::istream_iterator<std::string>(in), {}};
  if (fields.size() < 50) return std::nullopt;
  return Stat{fields[0][0], std::stoull(fields[19]), std::stoi(fields[49])};
}

std::string name_of_host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  char space[64];
  const ssize_t length = ::readlink("/proc/self/ns/pid", space, sizeof(space));
  if (length > 0) boot += '/' + std::string(space, static_cast<size_t>(length));
  return boot;
}

/// Never destroyed: threads check processes while this process exits.
std::string& host() {
  static auto* const name = new std::string(name_of_host());
  return *name;
}

}  // namespace

std::string ProcessName::encode() const {
  return std::to_string(pid) + ' ' + std::to_string(start_time) + ' ' + host;
}

std::optional<ProcessName> ProcessName::decode(const std::string& text) {
  std::istringstream in(text);
  ProcessName process;
  in >> process.pid >> process.start_time >> process.host;
  return in ? std::optional<ProcessName>(std::move(process)) : std::nullopt;
}

std::optional<ProcessName> this_process() {
  // Of one process; a forked child reads it again.
  static std::atomic<int64_t> pid{0};
  static std::atomic<uint64_t> start_time{0};
  if (pid != this_pid()) {
    const auto self = process_of(this_pid());
    if (!self) return std::nullopt;
    start_time = self->start_time;
    pid = self->pid;
  }
  return ProcessName{host(), pid, start_time};
}

std::optional<ProcessName> process_of(int64_t pid) {
  const auto stat = read_stat(pid);
  if (!stat || host().empty()) return std::nullopt;
  return ProcessName{host(), pid, stat->start_time};
}

int64_t this_pid() {
  // Cached, because a system call costs a tenth of a small collective.
  static std::atomic<int64_t> pid{0};
  static const int asked = ::pthread_atfork(nullptr, nullptr, [] { pid = 0; });
  int64_t known = pid.load(std::memory_order_relaxed);
  if (known == 0) {
    known = ::getpid();
    if (asked == 0) pid = known;
  }
  return known;
}

void throw_forked() {
  throw Error(
      "this process was forked from the process that created the communicator, so it is not a rank "
      "of it: create process groups and wrappers after the fork");
}

void pretend_host(const std::string& name) { host() = name; }

ProcessState state_of(const ProcessName& process) {
  const auto self = this_process();
  if (!self || self->host != process.host) return ProcessState::kUnknown;
  const auto stat = read_stat(process.pid);
  // /proc may be unreadable for other reasons.
  if (!stat)
    return ::kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH
               ? ProcessState::kEnded
               : ProcessState::kUnknown;
  // A zombie has exited: its parent has not waited for it yet.
  if (stat->start_time != process.start_time || stat->state == 'Z' || stat->state == 'X')
    return ProcessState::kEnded;
  return stat->state == 'T' || stat->state == 't' ? ProcessState::kStopped : ProcessState::kUnknown;
}

std::string outcome_of(const ProcessName& process) {
  const auto stat = read_stat(process.pid);
  if (!stat || stat->start_time != process.start_time) return "exit code unknown";
  if (WIFSIGNALED(stat->status)) return "signal " + std::to_string(WTERMSIG(stat->status));
  const int code = WEXITSTATUS(stat->status);
  return code == 0 ? std::string() : "exit code " + std::to_string(code);
}

}  // namespace apex::parallel
