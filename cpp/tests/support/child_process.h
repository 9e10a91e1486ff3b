// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A child process that a test can stop, resume or kill.

#include <array>
#include <csignal>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "watch/process_state.h"

namespace apex::testing {

/// A child that reports its process name and then sleeps until it is killed.
class ChildProcess {
 public:
  ChildProcess() {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::string name = parallel::this_process()->encode();
      if (::write(ends[1], name.data(), name.size()) < 0) ::_exit(1);
      ::close(ends[1]);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    std::string text(4096, '\0');
    const ssize_t length = ::read(ends[0], text.data(), text.size());
    ::close(ends[0]);
    name_ = *parallel::ProcessName::decode(text.substr(0, static_cast<size_t>(length)));
  }
  ~ChildProcess() {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const parallel::ProcessName& name() const { return name_; }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  void go_on() const {
    ::kill(pid_, SIGCONT);
    ::waitpid(pid_, nullptr, WCONTINUED);
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  void become_zombie() const {
    kill();
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_ = -1;
  parallel::ProcessName name_;
};

}  // namespace apex::testing
