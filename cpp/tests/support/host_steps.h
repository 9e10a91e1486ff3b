// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Defines APEX_HOST_STEP for library sources that are included after this header, and runs ranks
/// as processes of which one is killed or stopped at a step.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace apex::testing {
/// Called at every step of the protocol in this process.
inline std::function<void(const char*)> at_step;

/// Tests every fourth step, `salt` says which of the four. APEX_TEST_EVERY_STEP=1 tests all steps,
/// which takes minutes.
inline bool is_tried(int step, int salt) {
  const char* const every = std::getenv("APEX_TEST_EVERY_STEP");
  return (every != nullptr && std::string(every) == "1") || (step + salt) % 4 == 0;
}

/// In the victim: sends `signal` to itself at step `step`.
inline void hit_at(int step, int signal) {
  static std::atomic<int> steps;
  steps = 0;
  at_step = [step, signal](const char*) {
    if (steps++ == step) ::kill(::getpid(), signal);
  };
}

/// The number of steps of a victim, which calls the function that `run` is called with. A rank that
/// waits takes more steps; a step that is not reached has no effect.
template <typename Run>
int count_steps(const Run& run) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  run([fd = ends[1]] { at_step = [fd](const char*) { static_cast<void>(!::write(fd, "s", 1)); }; });
  ::close(ends[1]);
  int count = 0;
  char step = 0;
  while (::read(ends[0], &step, 1) == 1) ++count;
  ::close(ends[0]);
  return count;
}

struct Outcome {
  int status = -1;   ///< from waitpid(); -1: it had to be killed
  std::string said;  ///< "done", or the error
};

/// Runs `body` in a new process, which writes to `pipe` how it ended.
inline pid_t fork_rank(int pipe, const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  std::string said = "done";
  try {
    body();
  } catch (const std::exception& error) {
    said = error.what();
  }
  static_cast<void>(!::write(pipe, said.c_str(), said.size()));
  ::_exit(said == "done" ? 0 : 1);
}

/// Waits for the ranks and reads their pipes. Calls `on_stop` when one is stopped, and kills those
/// that have not ended at `until`.
inline std::vector<Outcome> wait_for_ranks(const std::vector<pid_t>& children,
                                           const std::vector<int>& pipes,
                                           std::chrono::steady_clock::time_point until,
                                           const std::function<void(pid_t)>& on_stop) {
  std::vector<Outcome> outcomes(children.size());
  for (size_t left = children.size(); left > 0 && std::chrono::steady_clock::now() < until;) {
    int status = 0;
    const pid_t child = ::waitpid(-1, &status, WUNTRACED | WNOHANG);
    if (child <= 0) {
      ::poll(nullptr, 0, 1);
      continue;
    }
    if (WIFSTOPPED(status)) {
      if (on_stop) on_stop(child);
      continue;
    }
    for (size_t rank = 0; rank < children.size(); ++rank) {
      if (children[rank] == child) outcomes[rank].status = status;
    }
    --left;
  }
  for (size_t rank = 0; rank < children.size(); ++rank) {
    if (outcomes[rank].status == -1) {
      ::kill(children[rank], SIGKILL);
      ::waitpid(children[rank], nullptr, 0);
    }
    char text[4096];
    ssize_t got = 0;
    while ((got = ::read(pipes[rank], text, sizeof(text))) > 0)
      outcomes[rank].said.append(text, static_cast<size_t>(got));
    ::close(pipes[rank]);
  }
  return outcomes;
}

inline void expect_done(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    EXPECT_EQ(outcomes[rank].said, "done") << "rank " << rank;
}
}  // namespace apex::testing

#define APEX_HOST_STEP(name)                                      \
  do {                                                            \
    if (::apex::testing::at_step) ::apex::testing::at_step(name); \
  } while (false)
