// SPDX-License-Identifier: BSD-3-Clause
#include <support/processes.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>

extern char** environ;

namespace apex::testing {
namespace {

constexpr const char* kFlag = "--apex_scenario=";

std::map<std::string, std::function<void()>>& scenarios() {
  static std::map<std::string, std::function<void()>> all;
  return all;
}

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

bool is_launcher_variable(const std::string& name) {
  for (const char* exact :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (name == exact) {
      return true;
    }
  }
  for (const char* prefix :
       {"SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "TORCHELASTIC_", "TORCH_DISTRIBUTED_"}) {
    if (name.rfind(prefix, 0) == 0) {
      return true;
    }
  }
  return false;
}

std::vector<std::string> environment_for(const ProcessSpec& spec) {
  std::map<std::string, std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (!is_launcher_variable(text.substr(0, equals))) {
      all[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  all["OMP_NUM_THREADS"] = "1";
  all["GLOO_SOCKET_IFNAME"] = "lo";
  for (const auto& entry : spec.environment) {
    all[entry.first] = entry.second;
  }
  std::vector<std::string> lines;
  for (const auto& entry : all) {
    lines.push_back(entry.first + "=" + entry.second);
  }
  return lines;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

/// A running process; the destructor kills and reaps it.
class Child {
 public:
  explicit Child(const ProcessSpec& spec) {
    std::vector<std::string> arguments{"/proc/self/exe", kFlag + spec.scenario};
    auto lines = environment_for(spec);
    const auto argv = pointers(arguments);
    const auto envp = pointers(lines);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      throw_errno("pipe2");
    }
    pid_ = fork();
    if (pid_ < 0) {
      throw_errno("fork");
    }
    if (pid_ == 0) {
      // Only async-signal-safe calls: the parent may have threads.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      execve(argv[0], argv.data(), envp.data());
      _exit(127);
    }
    close(ends[1]);
    output_ = ends[0];
  }

  Child(Child&& other) noexcept : pid_(other.pid_), output_(other.output_), result_(other.result_) {
    other.pid_ = -1;
    other.output_ = -1;
  }

  ~Child() {
    kill_it();
    while (output_ >= 0) {
      read_some();
    }
  }

  /// Readable while there is output or end of output; -1 afterwards.
  int output() const { return output_; }
  const ProcessResult& result() const { return result_; }

  void kill_it() {
    if (pid_ > 0) {
      result_.killed = true;
      ::kill(pid_, SIGKILL);
    }
  }

  /// Reads available output; at its end reaps the process.
  void read_some() {
    char buffer[4096];
    const ssize_t count = read(output_, buffer, sizeof(buffer));
    if (count > 0) {
      result_.output.append(buffer, static_cast<size_t>(count));
    } else if (count == 0 || errno != EINTR) {
      close(output_);
      output_ = -1;
      int status = 0;
      while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
      }
      pid_ = -1;
      if (WIFEXITED(status)) {
        result_.status = WEXITSTATUS(status);
        result_.killed = false;
      } else if (WIFSIGNALED(status)) {
        result_.signal = WTERMSIG(status);
      }
    }
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  ProcessResult result_;
};

sockaddr_in loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

Scenario::Scenario(const char* name, std::function<void()> body) {
  if (!scenarios().emplace(name, std::move(body)).second) {
    throw std::logic_error(std::string("there are two scenarios named ") + name);
  }
}

std::optional<int> run_scenario(int argc, char** argv) {
  if (argc != 2 || std::strncmp(argv[1], kFlag, std::strlen(kFlag)) != 0) {
    return std::nullopt;
  }
  const auto found = scenarios().find(argv[1] + std::strlen(kFlag));
  if (found == scenarios().end()) {
    std::cerr << "there is no scenario " << argv[1] << std::endl;
    return 2;
  }
  try {
    found->second();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}

void require(bool condition, const std::string& message) {
  if (!condition) {
    throw std::runtime_error(message);
  }
}

std::vector<ProcessResult> run_processes(const std::vector<ProcessSpec>& specs,
                                         const RunOptions& options) {
  using Clock = std::chrono::steady_clock;
  std::vector<Child> children;
  for (const ProcessSpec& spec : specs) {
    children.emplace_back(spec);
  }
  const auto end = Clock::now() + options.timeout;
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<Child*> owners;
    bool failed = false;
    for (Child& child : children) {
      if (child.output() >= 0) {
        waiting.push_back({child.output(), POLLIN, 0});
        owners.push_back(&child);
      } else {
        failed = failed || child.result().status != 0;
      }
    }
    if (waiting.empty()) {
      break;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0 || (failed && options.stop_at_failure)) {
      for (Child* child : owners) {
        child->kill_it();
      }
    }
    // After a kill the pipes close immediately, so no time limit is needed.
    if (poll(waiting.data(), waiting.size(), left > 0 ? static_cast<int>(left) : -1) > 0) {
      for (size_t i = 0; i < waiting.size(); ++i) {
        if (waiting[i].revents != 0) {
          owners[i]->read_some();
        }
      }
    }
  }
  std::vector<ProcessResult> results;
  for (const Child& child : children) {
    results.push_back(child.result());
  }
  return results;
}

std::vector<ProcessSpec> ranks_of(const std::string& scenario, int world_size,
                                  const std::map<std::string, std::string>& environment) {
  const std::string port = std::to_string(free_port());
  std::vector<ProcessSpec> specs;
  for (int rank = 0; rank < world_size; ++rank) {
    ProcessSpec spec;
    spec.scenario = scenario;
    spec.environment = {{"RANK", std::to_string(rank)},
                        {"WORLD_SIZE", std::to_string(world_size)},
                        {"LOCAL_RANK", std::to_string(rank)},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", port}};
    for (const auto& entry : environment) {
      spec.environment[entry.first] = entry.second;
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::string failures_of(const std::vector<ProcessResult>& results) {
  std::ostringstream text;
  bool failed = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const ProcessResult& result = results[i];
    failed = failed || result.status != 0;
    text << "process " << i << ": status " << result.status;
    if (result.signal != 0) {
      text << ", signal " << result.signal << (result.killed ? " (killed by the test)" : "");
    }
    text << "\n" << result.output << "\n";
  }
  return failed ? text.str() : "";
}

int free_port() { return OccupiedPort().port(); }

OccupiedPort::OccupiedPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  // Not a port that the system chooses: it may give that port to a connection before a rank listens
  // there.
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> ports(10000, 28000);
  auto address = loopback();
  for (int tries = 0; socket_ >= 0 && tries < 100; ++tries) {
    port_ = ports(random);
    address.sin_port = htons(static_cast<uint16_t>(port_));
    if (bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) continue;
    if (listen(socket_, 1) == 0) return;
    break;
  }
  throw_errno("a free port");
}

OccupiedPort::~OccupiedPort() {
  if (socket_ >= 0) {
    close(socket_);
  }
}

}  // namespace apex::testing
