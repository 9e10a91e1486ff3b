// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <apex/distributed/detail/launch_environment.h>

/// Connects the ranks of a job through a shared store.

namespace apex::distributed {

/// Rank, size and address of this process, fully resolved.
struct Rendezvous {
  InitMethod::Kind kind = InitMethod::Kind::kEnv;
  int rank = 0;
  int world_size = 1;
  /// For kEnv and kTcp.
  MasterAddress master;
  /// For kFile.
  std::string path;
  /// torchrun's agent hosts the store, so rank 0 is a client as well.
  bool agent_store = false;
  std::chrono::milliseconds timeout{0};

  /// "rank 1 of 2 at tcp://host:29500", for messages.
  std::string describe() const;
};

/// Connects to the store; rank 0 hosts it unless an agent does. Blocks for at most the timeout.
/// @throws apex::CommunicationError with the likely cause.
c10::intrusive_ptr<c10d::Store> connect_store(const Rendezvous& rendezvous);

/// Compares rank and world size with the other C++ processes of the job through `store`. Does not
/// wait for any of them, since Python ranks do not take part.
/// @throws apex::InvalidArgument when another process has the same rank or another world size.
void check_peers(const c10::intrusive_ptr<c10d::Store>& store, const Rendezvous& rendezvous);

}  // namespace apex::distributed
