// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// Ranks as real processes: the test executable starts itself again, once per rank.

namespace apex::testing {

/// What a process does is a scenario: a named function that is compiled into the executable.
/// A scenario that returns ends its process with status 0; one that throws prints
/// "error: <message>" and ends it with status 1.
class Scenario {
 public:
  /// For objects at namespace scope. Names are unique.
  Scenario(const char* name, std::function<void()> body);
};

/// In main(), before GoogleTest: runs the scenario that the command line names, if any, and gives
/// the exit status.
std::optional<int> run_scenario(int argc, char** argv);

/// Throws std::runtime_error(message) unless `condition`: for scenarios, where GoogleTest's
/// assertions would go unnoticed.
void require(bool condition, const std::string& message);

struct ProcessSpec {
  std::string scenario;
  /// On top of the environment of this process, from which every variable of a launcher (RANK,
  /// MASTER_ADDR, SLURM_*, ...) is taken out. Gloo is bound to the loopback interface.
  std::map<std::string, std::string> environment;
};

struct ProcessResult {
  /// Exit status, or -1 when a signal ended the process.
  int status = -1;
  int signal = 0;
  /// Killed because time was up, or because another process failed.
  bool killed = false;
  /// stdout and stderr, in the order of writing.
  std::string output;
};

struct RunOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Kill the others as soon as one fails.
  bool stop_at_failure = true;
};

/// Runs all processes at the same time and waits for all of them; kills what is left at the
/// timeout. No process outlives the call, or the test.
std::vector<ProcessResult> run_processes(const std::vector<ProcessSpec>& specs,
                                         const RunOptions& options = {});

/// `world_size` processes with the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
/// MASTER_ADDR 127.0.0.1, MASTER_PORT free), and `environment` on top for each.
std::vector<ProcessSpec> ranks_of(const std::string& scenario, int world_size,
                                  const std::map<std::string, std::string>& environment = {});

/// "" when every process ended with status 0, else what each of them did and wrote.
std::string failures_of(const std::vector<ProcessResult>& results);

/// A TCP port of 127.0.0.1 that was free a moment ago.
int free_port();

/// A listening socket on 127.0.0.1 for as long as it lives.
class OccupiedPort {
 public:
  OccupiedPort();
  ~OccupiedPort();
  OccupiedPort(const OccupiedPort&) = delete;
  OccupiedPort& operator=(const OccupiedPort&) = delete;
  int port() const { return port_; }

 private:
  int socket_ = -1;
  int port_ = 0;
};

}  // namespace apex::testing
