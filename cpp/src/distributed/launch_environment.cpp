// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed/launch_environment.h>

#include <cctype>
#include <cstdlib>

#include <apex/error.h>

namespace apex::distributed {
namespace {

int parse_int(const std::string& name, const std::string& value, long lowest, long highest) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  const bool digits = !value.empty() && std::isspace(static_cast<unsigned char>(value[0])) == 0;
  if (!digits || *end != '\0' || number < lowest || number > highest) {
    throw InvalidArgument(name + " is \"" + value + "\", but must be an integer from " +
                          std::to_string(lowest) + " to " + std::to_string(highest));
  }
  return static_cast<int>(number);
}

constexpr long kMaxRanks = 1L << 30;

std::optional<int> read_int(const EnvironmentLookup& lookup, const std::string& name, long lowest,
                            long highest) {
  const auto value = lookup(name);
  if (!value) {
    return std::nullopt;
  }
  return parse_int(name, *value, lowest, highest);
}

// The variables of one launcher; the first size that is set is used.
struct LauncherVariables {
  const char* launcher;
  const char* rank;
  std::vector<const char*> sizes;
  const char* local_rank;
  const char* local_size;
};

std::vector<LauncherVariables> known_launchers() {
  return {
      {"torchrun", "RANK", {"WORLD_SIZE"}, "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
      {"Open MPI",
       "OMPI_COMM_WORLD_RANK",
       {"OMPI_COMM_WORLD_SIZE"},
       "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"MPI", "PMI_RANK", {"PMI_SIZE"}, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
      {"SLURM",
       "SLURM_PROCID",
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"},
       "SLURM_LOCALID",
       nullptr},
  };
}

struct NamedSize {
  std::string name;
  std::optional<int> value;
};

NamedSize read_size(const EnvironmentLookup& lookup, const LauncherVariables& names) {
  NamedSize size;
  for (const char* name : names.sizes) {
    size = {name, read_int(lookup, name, 1, kMaxRanks)};
    if (size.value) {
      break;
    }
  }
  return size;
}

std::optional<std::string> slurm_node_list(const EnvironmentLookup& lookup) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (auto list = lookup(name)) {
      return list;
    }
  }
  return std::nullopt;
}

std::string default_host(const std::optional<LaunchRanks>& ranks, const EnvironmentLookup& lookup) {
  if (ranks && ranks->launcher != "torchrun") {
    if (ranks->local_world_size && *ranks->local_world_size == ranks->world_size) {
      return "127.0.0.1";
    }
    if (const auto list = slurm_node_list(lookup)) {
      return first_slurm_host(*list);
    }
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

void parse_query(const std::string& url, const std::string& query, InitMethod& method) {
  for (const std::string& pair : split(query, '&')) {
    const auto equals = pair.find('=');
    const std::string key = pair.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : pair.substr(equals + 1);
    if (key == "rank") {
      method.rank = parse_int("rank in " + url, value, 0, kMaxRanks);
    } else if (key == "world_size") {
      method.world_size = parse_int("world_size in " + url, value, 1, kMaxRanks);
    } else {
      throw InvalidArgument("\"" + key + "\" in the init_method " + url +
                            " is unknown: only rank and world_size are supported");
    }
  }
}

}  // namespace

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::string(value);
}

std::optional<LaunchRanks> read_launch_ranks(const EnvironmentLookup& lookup) {
  for (const LauncherVariables& names : known_launchers()) {
    const auto rank = read_int(lookup, names.rank, 0, kMaxRanks);
    const auto [size_name, size] = read_size(lookup, names);
    // A launcher's size without its rank is ignored, since e.g. a SLURM batch script has it. It is
    // an error only for the variables that users set themselves.
    if (!rank && !(size && names.launcher == std::string("torchrun"))) {
      continue;
    }
    if (!rank || !size) {
      throw InvalidArgument(std::string(rank ? names.rank : size_name) + " is set but " +
                            (rank ? names.sizes.front() : names.rank) +
                            " is not: set both, or pass options.rank and options.world_size");
    }
    if (*rank >= *size) {
      throw InvalidArgument(std::string(names.rank) + " is " + std::to_string(*rank) + " but " +
                            size_name + " is " + std::to_string(*size) + ": ranks go from 0 to " +
                            std::to_string(*size - 1));
    }
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
  if (host.empty() || host.find(']') != std::string::npos) {
    throw InvalidArgument("\"" + node_list +
                          "\" is not a SLURM node list: set MASTER_ADDR to the host name of rank "
                          "0");
  }
  return host;
}

InitMethod parse_init_method(const std::string& url) {
  InitMethod method;
  const auto question = url.find('?');
  const std::string address = url.substr(0, question);
  const auto scheme_end = address.find("://");
  const std::string scheme = lower(address.substr(0, scheme_end));
  const std::string rest = scheme_end == std::string::npos ? "" : address.substr(scheme_end + 3);
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
    if (method.host.empty()) {
      throw InvalidArgument("the init_method " + url + " has no host: use tcp://host:port");
    }
  } else if (scheme == "file" && rest.size() > 1 && rest.front() == '/') {
    method.kind = InitMethod::Kind::kFile;
    method.path = rest;
  } else {
    throw InvalidArgument(
        "the init_method \"" + url +
        "\" is not supported: use env://, tcp://host:port or file:///absolute/path");
  }
  if (question != std::string::npos) {
    parse_query(url, url.substr(question + 1), method);
  }
  return method;
}

std::vector<DeviceBackend> parse_backend(const std::string& backend) {
  const auto check_name = [&](const std::string& name) {
    if (name != "gloo" && name != "nccl" && name != "apex") {
      throw InvalidArgument("the backend \"" + name + "\" is unknown" +
                            (name == backend ? "" : " (in \"" + backend + "\")") +
                            ": use \"nccl\", \"gloo\", \"apex\" or \"cpu:gloo,cuda:nccl\"");
    }
  };
  const std::string text = lower(backend);
  if (text.find(':') == std::string::npos) {
    check_name(text);
    if (text == "nccl") {
      return {{c10::DeviceType::CUDA, text}};
    }
    if (text == "apex") {
      return {{c10::DeviceType::CPU, text}};
    }
    return {{c10::DeviceType::CPU, text}, {c10::DeviceType::CUDA, text}};
  }
  std::vector<DeviceBackend> result;
  for (const std::string& pair : split(text, ',')) {
    const auto parts = split(pair, ':');
    if (parts.size() != 2 || (parts[0] != "cpu" && parts[0] != "cuda")) {
      throw InvalidArgument(
          "\"" + pair + "\" in the backend \"" + backend +
          "\" is not supported: use cpu:<name> or cuda:<name>, e.g. \"cpu:gloo,cuda:nccl\"");
    }
    check_name(parts[1]);
    DeviceBackend entry;
    entry.device = parts[0] == "cpu" ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
    entry.backend = parts[1];
    if (entry.device == c10::DeviceType::CPU && entry.backend == "nccl") {
      throw InvalidArgument("NCCL does not support CPU tensors: use cpu:gloo in the backend \"" +
                            backend + "\"");
    }
    if (entry.device == c10::DeviceType::CUDA && entry.backend == "apex") {
      throw InvalidArgument("the backend \"apex\" supports only CPU tensors: use cuda:nccl in \"" +
                            backend + "\"");
    }
    for (const DeviceBackend& other : result) {
      if (other.device == entry.device) {
        throw InvalidArgument("the backend \"" + backend + "\" names " + parts[0] + " twice");
      }
    }
    result.push_back(entry);
  }
  return result;
}

int choose_gpu(int local_rank, int visible_gpus, const EnvironmentLookup& lookup) {
  const auto visible = lookup("CUDA_VISIBLE_DEVICES");
  const std::string seen =
      visible ? " (CUDA_VISIBLE_DEVICES is \"" + *visible + "\")" : std::string();
  if (visible_gpus <= 0) {
    throw InvalidArgument("NCCL needs a GPU and this process sees none" + seen +
                          ": check the driver, or use the gloo backend");
  }
  if (local_rank < visible_gpus) {
    return local_rank;
  }
  if (visible_gpus == 1 && visible && visible->find(',') == std::string::npos) {
    return 0;
  }
  throw InvalidArgument("local rank " + std::to_string(local_rank) + " needs GPU " +
                        std::to_string(local_rank) + " but this process sees only " +
                        std::to_string(visible_gpus) + seen +
                        ": start at most one process per GPU, or set options.device_index");
}

}  // namespace apex::distributed
