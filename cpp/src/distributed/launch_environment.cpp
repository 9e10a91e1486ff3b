// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed/detail/launch_environment.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <regex>

#include <apex/error.h>

namespace apex::distributed {
namespace {

int parse_int(const std::string& name, const std::string& value, long lowest, long highest) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  const bool digits = !value.empty() && std::isspace(static_cast<unsigned char>(value[0])) == 0;
  if (!digits || *end != '\0' || number < lowest || number > highest)
    throw InvalidArgument(name + " is \"" + value + "\", but must be an integer from " +
                          std::to_string(lowest) + " to " + std::to_string(highest));
  return static_cast<int>(number);
}

constexpr long kMaxRanks = 1L << 30;

std::optional<int> read_int(const EnvironmentLookup& lookup, const std::string& name, long lowest,
                            long highest) {
  const auto value = lookup(name);
  if (!value) return std::nullopt;
  return parse_int(name, *value, lowest, highest);
}

// The variables of one launcher.
struct LauncherVariables {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr LauncherVariables kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""},
};

/// The first host of a SLURM node list, in which a host may contain bracketed lists of numbers or
/// ranges: "rack[1-2]n[001-016],login1" gives "rack1n001".
std::string first_slurm_host(const std::string& node_list) {
  static const std::regex numbers(R"(\[([^\[\],-]+)[^\[\]]*\])");
  std::string host = std::regex_replace(node_list, numbers, "$1");
  host.resize(std::min(host.size(), host.find(',')));
  if (host.empty() || host.find_first_of("[]") != std::string::npos)
    throw InvalidArgument("\"" + node_list +
                          "\" is not a SLURM node list: set MASTER_ADDR to the host name of rank "
                          "0");
  return host;
}

}  // namespace

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<LaunchRanks> read_launch_ranks(const EnvironmentLookup& lookup) {
  for (const LauncherVariables& names : kLaunchers) {
    const auto rank = read_int(lookup, names.rank, 0, kMaxRanks);
    const auto size = read_int(lookup, names.size, 1, kMaxRanks);
    // A launcher's size without its rank is ignored, since e.g. a SLURM batch script has it. It is
    // an error only for the variables that users set themselves.
    if (!rank && !(size && names.launcher == std::string("torchrun"))) continue;
    if (!rank || !size)
      throw InvalidArgument(std::string(rank ? names.rank : names.size) + " is set but " +
                            (rank ? names.size : names.rank) +
                            " is not: set both, or pass options.rank and options.world_size");
    if (*rank >= *size)
      throw InvalidArgument(std::string(names.rank) + " is " + std::to_string(*rank) + " but " +
                            names.size + " is " + std::to_string(*size) + ": ranks go from 0 to " +
                            std::to_string(*size - 1));
    LaunchRanks ranks;
    ranks.launcher = names.launcher;
    ranks.rank = *rank;
    ranks.world_size = *size;
    ranks.local_rank = read_int(lookup, names.local_rank, 0, kMaxRanks);
    ranks.local_world_size = read_int(lookup, names.local_size, 1, kMaxRanks);
    return ranks;
  }
  return std::nullopt;
}

MasterAddress read_master_address(const std::optional<LaunchRanks>& ranks,
                                  const EnvironmentLookup& lookup) {
  constexpr int kTorchDefault = 29500;
  const bool derived = ranks && ranks->launcher != "torchrun";
  MasterAddress address;
  auto nodes = lookup("SLURM_STEP_NODELIST");
  if (!nodes) nodes = lookup("SLURM_JOB_NODELIST");
  if (const auto host = lookup("MASTER_ADDR")) {
    address.host = *host;
  } else if (derived && ranks->local_world_size == ranks->world_size) {
    address.host = "127.0.0.1";
  } else if (derived && nodes) {
    address.host = first_slurm_host(*nodes);
  } else {
    throw InvalidArgument(
        "MASTER_ADDR is not set: set it to the host name of rank 0 on every rank, start the "
        "program with torchrun, or pass init_method = \"tcp://host:port\"");
  }
  if (const auto port = read_int(lookup, "MASTER_PORT", 1, 65535)) {
    address.port = *port;
  } else if (derived) {
    const auto job = lookup("SLURM_JOB_ID");
    // Below the usual range of ephemeral ports.
    address.port = job ? 15000 + std::abs(std::atoi(job->c_str())) % 14000 : kTorchDefault;
  } else {
    throw InvalidArgument(
        "MASTER_PORT is not set: set it to a free port of rank 0's host, the same on every rank, "
        "or start the program with torchrun");
  }
  return address;
}

std::optional<MasterAddress> parse_init_method(const std::string& url) {
  if (url == "env://") return std::nullopt;
  static const std::regex tcp(R"(tcp://(?:\[(.+)\]|(.+)):(.*))");
  std::smatch parts;
  if (!std::regex_match(url, parts, tcp))
    throw InvalidArgument("the init_method \"" + url +
                          "\" is not supported: use env:// or tcp://host:port");
  return MasterAddress{parts[1].matched ? parts[1].str() : parts[2].str(),
                       parse_int("the port in " + url, parts[3].str(), 0, 65535)};
}

std::vector<DeviceBackend> parse_backend(const std::string& backend) {
  constexpr auto kCpu = c10::DeviceType::CPU, kCuda = c10::DeviceType::CUDA;
  if (backend == "nccl") return {{kCuda, backend}};
  if (backend == "apex") return {{kCpu, backend}};
  if (backend == "gloo") return {{kCpu, backend}, {kCuda, backend}};
  static const std::regex by_device("cpu:(gloo|apex)(,cuda:(gloo|nccl))?|cuda:(gloo|nccl)");
  std::smatch parts;
  if (!std::regex_match(backend, parts, by_device))
    throw InvalidArgument("the backend \"" + backend +
                          "\" is not supported: use \"nccl\", \"gloo\", \"apex\", or a list by "
                          "device: cpu:gloo or cpu:apex, cuda:nccl or cuda:gloo, or both, e.g. "
                          "\"cpu:gloo,cuda:nccl\"");
  std::vector<DeviceBackend> result;
  if (parts[1].matched) result.push_back({kCpu, parts[1].str()});
  for (const size_t on_cuda : {3, 4}) {
    if (parts[on_cuda].matched) result.push_back({kCuda, parts[on_cuda].str()});
  }
  return result;
}

int choose_gpu(int local_rank, int visible_gpus, const EnvironmentLookup& lookup) {
  const auto visible = lookup("CUDA_VISIBLE_DEVICES");
  const std::string seen =
      visible ? " (CUDA_VISIBLE_DEVICES is \"" + *visible + "\")" : std::string();
  if (visible_gpus <= 0)
    throw InvalidArgument("NCCL needs a GPU and this process sees none" + seen +
                          ": check the driver, or use the gloo backend");
  if (local_rank < visible_gpus) return local_rank;
  if (visible_gpus == 1 && visible && visible->find(',') == std::string::npos) return 0;
  throw InvalidArgument("local rank " + std::to_string(local_rank) + " needs GPU " +
                        std::to_string(local_rank) + " but this process sees only " +
                        std::to_string(visible_gpus) + seen +
                        ": start at most one process per GPU, or set options.device_index");
}

}  // namespace apex::distributed
