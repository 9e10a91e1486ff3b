// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// Ranks as real processes: the test executable launches itself once per rank.

namespace apex::testing {

/// A scenario is what a process runs: a named function compiled into the executable. If it returns,
/// the process exits with status 0. If it throws, the process prints "error: <message>" and exits
/// with status 1.
class Scenario {
 public:
  /// For objects at namespace scope. Names are unique.
  Scenario(const char* name, std::function<void()> body);
};

/// Call in main() before GoogleTest. Runs the scenario named on the command line, if any, and
/// returns the exit status.
std::optional<int> run_scenario(int argc, char** argv);

/// Throws std::runtime_error(message) unless `condition`. For scenarios, where GoogleTest does not
/// see failed assertions.
void require(bool condition, const std::string& message);

struct ProcessSpec {
  std::string scenario;
  /// Added to this process's environment, without its launcher variables (RANK, MASTER_ADDR,
  /// SLURM_*, ...). Gloo is bound to the loopback interface.
  std::map<std::string, std::string> environment;
};

struct ProcessResult {
  /// Exit status, or -1 when a signal ended the process.
  int status = -1;
  int signal = 0;
  /// Killed on timeout, or because another process failed.
  bool killed = false;
  /// stdout and stderr, interleaved as written.
  std::string output;
};

struct RunOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Kill the others as soon as one fails.
  bool stop_at_failure = true;
};

/// Runs all processes concurrently and waits for them; kills the remaining ones at the timeout. No
/// process outlives the call or the test.
std::vector<ProcessResult> run_processes(const std::vector<ProcessSpec>& specs,
                                         const RunOptions& options = {});

/// `world_size` processes with the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
/// MASTER_ADDR 127.0.0.1, MASTER_PORT free), and `environment` on top for each.
std::vector<ProcessSpec> ranks_of(const std::string& scenario, int world_size,
                                  const std::map<std::string, std::string>& environment = {});

/// "" if every process exited with status 0, else the status and output of each.
std::string failures_of(const std::vector<ProcessResult>& results);

/// A TCP port of 127.0.0.1 that was free when checked.
int free_port();

/// Holds a listening socket on 127.0.0.1.
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
