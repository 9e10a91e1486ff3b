// SPDX-License-Identifier: BSD-3-Clause
#include <distributed/rendezvous.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "error_text.h"

namespace apex::distributed {
namespace {

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

[[noreturn]] void throw_not_joined(const Rendezvous& rendezvous, const std::string& why) {
  throw CommunicationError(rendezvous.describe() + " could not join within " +
                           std::to_string(rendezvous.timeout.count()) + " ms: " + why);
}

// The likely cause and the remedy, from the message of libtorch's store.
std::string advice(const std::string& message, const Rendezvous& rendezvous) {
  const std::string port = std::to_string(rendezvous.master.port);
  if (contains(message, "EADDRINUSE") || contains(message, "address already in use")) {
    return "port " + port +
           " is in use on this host: set MASTER_PORT to a free port on every rank, and start only "
           "one process as rank 0";
  }
  if (contains(message, "waiting for clients")) {
    return "not every rank joined: check that " + std::to_string(rendezvous.world_size) +
           " processes were started and that they can reach this host";
  }
  if (contains(message, "Ping failed")) {
    return "another program listens at " + rendezvous.master.host + ":" + port +
           ": set MASTER_PORT to a free port on every rank";
  }
  return "the store of rank 0 does not answer: check that MASTER_ADDR and MASTER_PORT are those of "
         "this job and that rank 0 is alive";
}

std::string identity() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return "process " + std::to_string(getpid()) + " on " + host;
}

// Writes `value` if `key` is unset; returns the current value.
std::string claim(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key,
                  const std::string& value) {
  return store->compareSet(key, std::string(), value);
}

}  // namespace

std::string Rendezvous::describe() const {
  const std::string place = kind == InitMethod::Kind::kFile
                                ? "file://" + path
                                : "tcp://" + master.host + ":" + std::to_string(master.port);
  return "rank " + std::to_string(rank) + " of " + std::to_string(world_size) + " at " + place;
}

c10::intrusive_ptr<c10d::Store> connect_store(const Rendezvous& rendezvous) {
  const bool is_server = rendezvous.rank == 0 && !rendezvous.agent_store;
  try {
    if (rendezvous.kind == InitMethod::Kind::kFile) {
      // torch would retry for longer than the timeout.
      const auto folder = std::filesystem::absolute(rendezvous.path).parent_path();
      if (!std::filesystem::is_directory(folder))
        throw Error("there is no directory '" + folder.string() + "'");
      const int file = ::open(rendezvous.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (file < 0) throw Error(std::generic_category().message(errno));
      ::close(file);
      auto store = c10::make_intrusive<c10d::FileStore>(rendezvous.path, rendezvous.world_size);
      store->setTimeout(rendezvous.timeout);
      return store;
    }
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(rendezvous.master.port);
    options.isServer = is_server;
    options.numWorkers = rendezvous.world_size;
    options.timeout = rendezvous.timeout;
    options.multiTenant = !rendezvous.agent_store;
    options.useLibUV = process_environment("USE_LIBUV").value_or("1") == "1";
    auto store = c10::make_intrusive<c10d::TCPStore>(rendezvous.master.host, options);
    store->setTimeout(rendezvous.timeout);
    return store;
  } catch (const std::exception&) {
    const std::string message = parallel::first_line_of(std::current_exception());
    throw_not_joined(
        rendezvous,
        (rendezvous.kind == InitMethod::Kind::kFile
             ? "the file could not be used: check that its directory exists and is writable"
             : advice(message, rendezvous)) +
            " (" + message + ")");
  }
}

void check_peers(const c10::intrusive_ptr<c10d::Store>& store, const Rendezvous& rendezvous) {
  // A process that joins again must not find its earlier entries.
  static std::atomic<int> joins{0};
  const auto notes =
      c10::make_intrusive<c10d::PrefixStore>("apex/" + std::to_string(joins++), store);

  const std::string size = std::to_string(rendezvous.world_size);
  const std::string other_size = claim(notes, "world_size", size);
  if (other_size != size)
    throw InvalidArgument(rendezvous.describe() + " was started with world size " + size +
                          ", but another rank with world size " + other_size +
                          ": set the same WORLD_SIZE on every rank");
  const std::string self = identity();
  const std::string other = claim(notes, "rank" + std::to_string(rendezvous.rank), self);
  if (other != self) {
    throw InvalidArgument(
        rendezvous.describe() + " (" + self + ") cannot join: " + other +
        " has already joined with this rank; " +
        (rendezvous.kind == InitMethod::Kind::kFile
             ? "if that process is from an earlier job, delete the file, otherwise give every "
               "process its own rank"
             : "set a different RANK in every process"));
  }
}

}  // namespace apex::distributed
