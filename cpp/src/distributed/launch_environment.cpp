// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed/detail/launch_environment.h>

#include <cctype>
#include <cstdlib>

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
    {"SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

std::optional<std::string> slurm_node_list(const EnvironmentLookup& lookup) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (auto list = lookup(name)) return list;
  }
  return std::nullopt;
}

std::string default_host(const std::optional<LaunchRanks>& ranks, const EnvironmentLookup& lookup) {
  if (ranks && ranks->launcher != "torchrun") {
    if (ranks->local_world_size && *ranks->local_world_size == ranks->world_size)
      return "127.0.0.1";
    if (const auto list = slurm_node_list(lookup)) return first_slurm_host(*list);
  }
  throw InvalidArgument(
      "MASTER_ADDR is not set: set it to the host name of rank 0 on every rank, start the program "
      "with torchrun, or pass init_method = \"tcp://host:port\"");
}

int default_port(const std::optional<LaunchRanks>& ranks, const EnvironmentLookup& lookup) {
  constexpr int kTorchDefault = 29500;
  if (ranks && ranks->launcher != "torchrun") {
    // Below the usual range of ephemeral ports.
    const auto job = lookup("SLURM_JOB_ID");
    return job ? 15000 + std::abs(std::atoi(job->c_str())) % 14000 : kTorchDefault;
  }
  throw InvalidArgument(
      "MASTER_PORT is not set: set it to a free port of rank 0's host, the same on every rank, or "
      "start the program with torchrun");
}

std::string lower(std::string text) {
  for (char& letter : text) {
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return text;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char letter : text) {
    if (letter == separator) {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  return parts;
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
    if (names.local_size != nullptr) {
      ranks.local_world_size = read_int(lookup, names.local_size, 1, kMaxRanks);
    }
    return ranks;
  }
  return std::nullopt;
}

MasterAddress read_master_address(const std::optional<LaunchRanks>& ranks,
                                  const EnvironmentLookup& lookup) {
  MasterAddress address;
  const auto host = lookup("MASTER_ADDR");
  address.host = host ? *host : default_host(ranks, lookup);
  const auto port = read_int(lookup, "MASTER_PORT", 1, 65535);
  address.port = port ? *port : default_port(ranks, lookup);
  return address;
}

std::string first_slurm_host(const std::string& node_list) {
  // Grammar: hosts separated by commas. A host may contain bracketed lists of numbers or ranges
  // with significant leading zeros, e.g. rack[1-2]n[001-016].
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      host += node_list[i];
      continue;
    }
    const auto close = node_list.find(']', i);
    const auto end = node_list.find_first_of("-,]", i);
    if (close == std::string::npos || end == i + 1) {
      host.clear();
      break;
    }
    host += node_list.substr(i + 1, end - i - 1);
    i = close;
  }
  if (host.empty() || host.find(']') != std::string::npos)
    throw InvalidArgument("\"" + node_list +
                          "\" is not a SLURM node list: set MASTER_ADDR to the host name of rank "
                          "0");
  return host;
}

InitMethod parse_init_method(const std::string& url) {
  InitMethod method;
  const auto scheme_end = url.find("://");
  const std::string scheme = lower(url.substr(0, scheme_end));
  const std::string rest = scheme_end == std::string::npos ? "" : url.substr(scheme_end + 3);
  if (scheme_end != std::string::npos && scheme == "env" && rest.empty()) {
    method.kind = InitMethod::Kind::kEnv;
  } else if (scheme == "tcp" && rest.rfind(':') != std::string::npos) {
    method.kind = InitMethod::Kind::kTcp;
    const auto colon = rest.rfind(':');
    method.host = rest.substr(0, colon);
    if (method.host.size() > 2 && method.host.front() == '[' && method.host.back() == ']') {
      method.host = method.host.substr(1, method.host.size() - 2);
    }
    method.port = parse_int("the port in " + url, rest.substr(colon + 1), 1, 65535);
    if (method.host.empty())
      throw InvalidArgument("the init_method " + url + " has no host: use tcp://host:port");
  } else if (scheme == "file" && rest.size() > 1 && rest.front() == '/') {
    method.kind = InitMethod::Kind::kFile;
    method.path = rest;
  } else {
    throw InvalidArgument(
        "the init_method \"" + url +
        "\" is not supported: use env://, tcp://host:port or file:///absolute/path");
  }
  return method;
}

std::vector<DeviceBackend> parse_backend(const std::string& backend) {
  constexpr auto kCpu = c10::DeviceType::CPU, kCuda = c10::DeviceType::CUDA;
  const auto refuse = [&](const std::string& what, const std::string& why) {
    throw InvalidArgument(what + (what == '"' + backend + '"' ? "" : " in \"" + backend + '"') +
                          why);
  };
  const auto check_name = [&](const std::string& name) {
    if (name != "gloo" && name != "nccl" && name != "apex")
      refuse('"' + name + '"',
             " is an unknown backend: use \"nccl\", \"gloo\", \"apex\" or \"cpu:gloo,cuda:nccl\"");
  };
  const std::string text = lower(backend);
  if (text.find(':') == std::string::npos) {
    check_name(text);
    if (text == "nccl") return {{kCuda, text}};
    if (text == "apex") return {{kCpu, text}};
    return {{kCpu, text}, {kCuda, text}};
  }
  std::vector<DeviceBackend> result;
  for (const std::string& pair : split(text, ',')) {
    const auto parts = split(pair, ':');
    if (parts.size() != 2 || (parts[0] != "cpu" && parts[0] != "cuda"))
      refuse('"' + pair + '"',
             " is not supported: use cpu:<name> or cuda:<name>, e.g. \"cpu:gloo,cuda:nccl\"");
    check_name(parts[1]);
    if (pair == "cpu:nccl") refuse("NCCL", " does not support CPU tensors: use cpu:gloo");
    if (pair == "cuda:apex") refuse("apex", " supports only CPU tensors: use cuda:nccl");
    const auto device = parts[0] == "cpu" ? kCpu : kCuda;
    for (const DeviceBackend& other : result) {
      if (other.device == device) refuse(parts[0], " is named twice");
    }
    result.push_back({device, parts[1]});
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
