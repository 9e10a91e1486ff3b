// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_topology.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/error.h>

#include "distributed/backends.h"
#include "plain_text.h"
#include "watch/process_state.h"

namespace apex::parallel {

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A rank's description of itself, and which other ranks it can read.
struct Introduction {
  char process[192] = {};  ///< ProcessName, encoded
  bool declines = false;   ///< the channel
  HostFile file;           ///< its memory
};
struct Finding {
  char problem[256] = {};  ///< empty: it can read all ranks' memory
};

template <typename Text, size_t size>
void put(Text (&field)[size], const std::string& text) {
  std::memcpy(field, text.data(), character_before(text, size - 1));
}

/// Gathers the record of every rank.
template <typename Record>
std::vector<Record> exchange(c10d::Backend& backend, const Record& mine) {
  const auto bytes = static_cast<int64_t>(sizeof(Record));
  at::Tensor share = at::empty({bytes}, at::kByte);
  std::memcpy(share.mutable_data_ptr(), &mine, sizeof(Record));
  at::Tensor all = at::empty({backend.getSize() * bytes}, at::kByte);
  backend._allgather_base(all, share, c10d::AllgatherOptions())->wait();
  std::vector<Record> records(static_cast<size_t>(backend.getSize()));
  std::memcpy(records.data(), all.const_data_ptr(), all.nbytes());
  return records;
}

/// The memory of this rank for a channel; null if `mine` declines, or `finding` has the problem.
std::shared_ptr<HostMemory> make_memory(Introduction& mine, Finding& finding) {
  const auto process = this_process();
  const char* const channel = std::getenv("APEX_HOST_CHANNEL");
  mine.declines = !process || (channel != nullptr && std::strcmp(channel, "0") == 0);
  if (process) put(mine.process, process->encode());
  if (mine.declines) return nullptr;
  try {
    auto memory = HostChannel::make_memory();
    mine.file = memory->file();
    return memory;
  } catch (const std::exception& error) {
    put(finding.problem, error.what());
    return nullptr;
  }
}

/// The process of each rank; empty if one is unknown or two ranks are the same process.
std::vector<ProcessName> processes_of(const std::vector<Introduction>& ranks) {
  std::vector<ProcessName> processes;
  std::set<std::pair<std::string, int64_t>> different;
  for (const Introduction& rank : ranks) {
    const auto process = ProcessName::decode(rank.process);
    if (!process || !different.emplace(process->host, process->pid).second) return {};
    processes.push_back(*process);
  }
  return processes;
}

/// Maps the memory of `among`, ranks of this host; records the first problem.
std::vector<HostChannel::Peer> map_peers(int self, const std::vector<int>& among,
                                         const std::vector<Introduction>& ranks, Finding& finding) {
  std::vector<HostChannel::Peer> peers(among.size());
  for (size_t i = 0; i < among.size(); ++i) {
    const auto rank = static_cast<size_t>(among[i]);
    HostChannel::Peer& peer = peers[i];
    peer.process = ProcessName::decode(ranks[rank].process);
    peer.named = among[i];
    const HostFile& file = ranks[rank].file;
    // A rank without memory reports the reason itself.
    if (among[i] == self || file.fd < 0 || finding.problem[0] != 0) continue;
    try {
      peer.memory = std::make_shared<PeerMemory>(peer.process->pid, file);
    } catch (const std::exception& error) {
      put(finding.problem, "memory of rank " + std::to_string(rank) + ": " + error.what());
    }
  }
  return peers;
}

/// Whether no rank has found a problem; otherwise each rank logs the first one.
bool all_are_fine(c10d::Backend& backend, const Finding& mine, const char* what) {
  const std::vector<Finding> findings = exchange(backend, mine);
  for (size_t rank = 0; rank < findings.size(); ++rank) {
    if (findings[rank].problem[0] == 0) continue;
    TORCH_WARN_ONCE(
        "apex: the ranks communicate through the process group instead of shared memory, since "
        "rank ",
        rank, " of ", findings.size(), " cannot ", what, " (", findings[rank].problem,
        "); APEX_HOST_CHANNEL=0 skips the attempt");
    return false;
  }
  return true;
}

}  // namespace

HostLinks connect_host(c10d::Backend& backend, const BackendPtr& gloo, const StorePtr& store,
                       std::chrono::milliseconds timeout) {
  HostLinks links;
  Introduction mine;
  Finding finding;
  auto memory = make_memory(mine, finding);
  const std::vector<Introduction> ranks = exchange(backend, mine);
  links.processes = processes_of(ranks);
  // Decisions use only gathered data, so all ranks take the same ones.
  if (links.processes.empty() ||
      std::any_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.declines; }))
    return links;
  const int self = backend.getRank();
  std::map<std::string, std::vector<int>> hosts;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    hosts[links.processes[rank].host].push_back(static_cast<int>(rank));
  const auto host = hosts.find(links.processes[static_cast<size_t>(self)].host);
  const std::vector<int>& here = host->second;
  const bool even = std::all_of(hosts.begin(), hosts.end(),
                                [&](const auto& one) { return one.second.size() == here.size(); });
  const bool several = hosts.size() > 1;
  if (!even || here.size() > HostChannel::kMostRanks || (several && (!gloo || here.size() == 1)))
    return links;
  auto peers = map_peers(self, here, ranks, finding);
  if (!all_are_fine(backend, finding, "share memory")) return links;
  const auto place = std::find(here.begin(), here.end(), self) - here.begin();
  auto channel = std::make_shared<HostChannel>(static_cast<int>(place), std::move(memory),
                                               std::move(peers), timeout);
  BackendPtr column;
  if (several) {
    // The random number makes the key prefix unique in the store.
    const std::string name = "apex/hosts/" + std::to_string(ranks.front().file.number) + "/" +
                             std::to_string(place) + "/";
    try {
      column = distributed::make_gloo_backend_like(
          *gloo, c10::make_intrusive<c10d::PrefixStore>(name, store),
          static_cast<int>(std::distance(hosts.begin(), host)), static_cast<int>(hosts.size()));
    } catch (const std::exception& error) {
      put(finding.problem, error.what());
    }
    if (!all_are_fine(backend, finding, "connect to its counterparts on other hosts")) return links;
  }
  links.channel = std::move(channel);
  links.column = std::move(column);
  return links;
}

}  // namespace apex::parallel
