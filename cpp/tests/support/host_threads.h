// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Ranks of one host as threads that share memory.

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "transport/host_channel.h"

namespace apex::testing {

using Channels = std::vector<std::shared_ptr<parallel::HostChannel>>;

/// One channel per rank.
inline Channels connect_channels(int ranks,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  using namespace parallel;
  std::vector<std::shared_ptr<HostMemory>> memories;
  for (int rank = 0; rank < ranks; ++rank) {
    memories.push_back(HostChannel::make_memory(size_t{1} << 30));
  }
  Channels channels;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<HostChannel::Peer> peers(ranks);
    for (int peer = 0; peer < ranks; ++peer) {
      peers[peer].named = peer;
      if (peer != rank) peers[peer].memory = std::make_shared<PeerMemory>(memories[peer]);
    }
    channels.push_back(
        std::make_shared<HostChannel>(rank, memories[rank], std::move(peers), timeout));
  }
  return channels;
}

/// Runs `body(rank)` on one thread per rank; returns each rank's exception message, or "".
inline std::vector<std::string> on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

}  // namespace apex::testing
