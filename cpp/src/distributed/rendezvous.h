// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <apex/distributed/launch_environment.h>

/// How the ranks of a job find each other: the store that all of them share.

namespace apex::distributed {

/// Rank, size and meeting place of this process, all known.
struct Rendezvous {
  InitMethod::Kind kind = InitMethod::Kind::kEnv;
  int rank = 0;
  int world_size = 1;
  /// Of kEnv and kTcp.
  MasterAddress master;
  /// Of kFile.
  std::string path;
  /// The store is hosted by torchrun's agent, so that rank 0 is a client, too.
  bool agent_store = false;
  std::chrono::milliseconds timeout{0};

  /// "rank 1 of 2 at tcp://host:29500", for messages.
  std::string describe() const;
};

/// Connects to the store; rank 0 hosts it unless an agent does. Blocks at most the timeout.
/// @throws apex::CommunicationError with the likely cause.
c10::intrusive_ptr<c10d::Store> connect_store(const Rendezvous& rendezvous);

/// Compares notes with the other C++ processes of the job through `store`, without waiting for
/// any: Python ranks keep no notes.
/// @throws apex::InvalidArgument when another process has the same rank or another world size.
void check_peers(const c10::intrusive_ptr<c10d::Store>& store, const Rendezvous& rendezvous);

/// The first line of what an exception says, without libtorch's stack trace.
std::string message_of(const std::exception& error);

}  // namespace apex::distributed
