#include "comm/host_topology.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/process_state.h"
#include "distributed/backends.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

constexpr const char* kHandshake = "handshake of ranks that may share memory";

/// What a rank says of itself, and then of what it has found.
struct Introduction {
  char process[192] = {};  ///< ProcessName, encoded; empty: this rank wants no channel
  HostPlace first;
  uint64_t number = 0;  ///< to be found at numbered()
};
struct Finding {
  char problem[256] = {};  ///< empty: it can read everybody's memory
};

/// Where the random number lies in a first block, behind all that the channel uses.
constexpr size_t kNumberAt = HostChannel::kFirstBytes - sizeof(uint64_t);

template <typename Text, size_t size>
void put(Text (&field)[size], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), size - 1));
}

template <typename Record>
std::vector<Record> exchange(c10d::ProcessGroup& group, const Record& mine) {
  const auto bytes = static_cast<int64_t>(sizeof(Record));
  at::Tensor share = at::empty({bytes}, at::kByte);
  std::memcpy(share.mutable_data_ptr(), &mine, sizeof(Record));
  const at::Tensor all = at::empty({group.getSize() * bytes}, at::kByte);
  run_collective(kHandshake, group,
                 [&] { return issue_all_gather(kHandshake, group, all, share, Way::kBackend); });
  std::vector<Record> records(static_cast<size_t>(group.getSize()));
  std::memcpy(records.data(), all.const_data_ptr(), all.nbytes());
  return records;
}

bool is_switched_off() {
  const char* value = std::getenv("APEX_HOST_CHANNEL");
  return value != nullptr && std::strcmp(value, "0") == 0;
}

std::shared_ptr<HostChannel> connect(c10d::ProcessGroup& group, std::chrono::milliseconds timeout) {
  Introduction mine;
  Finding finding;
  std::shared_ptr<HostMemory> memory;
  const auto process = this_process();
  if (!is_switched_off() && process) {
    put(mine.process, process->encode());
    try {
      memory = HostMemory::create(HostChannel::kFirstBytes);
      HostChannel::prepare(*memory);
      std::random_device random;
      mine.number = uint64_t{random()} << 32 | random();
      std::memcpy(memory->first() + kNumberAt, &mine.number, sizeof(mine.number));
      mine.first = memory->first_place();
    } catch (const std::exception& error) {
      put(finding.problem, error.what());
    }
  }
  const std::vector<Introduction> ranks = exchange(group, mine);

  // Ranks that differ in what they read here would differ in what they do: all see the same.
  std::set<std::string> hosts;
  std::set<int64_t> pids;
  std::vector<HostChannel::Peer> peers(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    peers[rank].process = ProcessName::decode(ranks[rank].process);
    if (!peers[rank].process) return nullptr;  // one wants none
    peers[rank].first = ranks[rank].first;
    hosts.insert(peers[rank].process->host);
    pids.insert(peers[rank].process->pid);
  }
  if (hosts.size() > 1 || pids.size() < ranks.size() || ranks.size() > HostChannel::kMostRanks)
    return nullptr;

  for (size_t rank = 0; rank < ranks.size() && finding.problem[0] == 0; ++rank) {
    if (static_cast<int>(rank) == group.getRank()) continue;
    try {
      if (ranks[rank].first.fd < 0) throw Error("rank " + std::to_string(rank) + " has none");
      peers[rank].memory = std::make_unique<PeerMemory>(peers[rank].process->pid);
      uint64_t number = 0;
      std::memcpy(&number, peers[rank].memory->at(ranks[rank].first) + kNumberAt, sizeof(number));
      if (number != ranks[rank].number) throw Error("it holds something else");
    } catch (const std::exception& error) {
      put(finding.problem, "memory of rank " + std::to_string(rank) + ": " + error.what());
    }
  }
  const std::vector<Finding> findings = exchange(group, finding);
  for (size_t rank = 0; rank < findings.size(); ++rank) {
    if (findings[rank].problem[0] == 0) continue;
    TORCH_WARN("apex: the ranks of this host talk through the process group, since rank ", rank,
               " of ", findings.size(), " cannot share memory (", findings[rank].problem,
               "); APEX_HOST_CHANNEL=0 skips the attempt");
    return nullptr;
  }
  return std::make_shared<HostChannel>(group.getRank(), std::move(memory), std::move(peers),
                                       timeout);
}

/// By group. A weak pointer to a group would keep its destructor from running; so it is known by
/// its address, its name and its store, and its channel ends with it where drop_host_channel() is
/// called, else when another group takes its address.
struct Channels {
  struct Entry {
    const void* store;
    std::string name;
    std::shared_ptr<HostChannel> channel;
  };
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, Entry> entries;
  /// By group: threads may connect two groups in another order than those of another rank do.
  std::map<const c10d::ProcessGroup*, std::shared_ptr<std::mutex>> connecting;

  std::shared_ptr<std::mutex> connecting_of(const c10d::ProcessGroup& group) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<std::mutex>& one = connecting[&group];
    if (!one) one = std::make_shared<std::mutex>();
    return one;
  }

  std::optional<std::shared_ptr<HostChannel>> find(const c10d::ProcessGroup& group) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = entries.find(&group);
    if (found == entries.end()) return std::nullopt;
    const Entry& entry = found->second;
    if (entry.store != group.getStore().get() || entry.name != group.getGroupName())
      return std::nullopt;
    return entry.channel;
  }
};

// Never destroyed: groups may be used while the process ends.
Channels& channels() {
  static auto* const instance = new Channels;
  return *instance;
}

}  // namespace

std::shared_ptr<HostChannel> host_channel_of(const c10d::ProcessGroup& given) {
  if (given.getSize() == 1) return nullptr;
  Channels& all = channels();
  if (const auto found = all.find(given)) return *found;
  const std::shared_ptr<std::mutex> of_group = all.connecting_of(given);
  const std::lock_guard<std::mutex> connecting(*of_group);
  if (const auto found = all.find(given)) return *found;
  auto& group = const_cast<c10d::ProcessGroup&>(given);
  std::shared_ptr<HostChannel> channel;
  if (detail::has_backend(group, at::kCPU)) {
    if (const auto timeout = distributed::gloo_timeout(*group.getBackend(at::kCPU)))
      channel = connect(group, *timeout);
  }
  std::shared_ptr<HostChannel> ended;  // outlives the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto before = all.entries.find(&group);
  if (before != all.entries.end()) ended = std::move(before->second.channel);
  all.entries[&group] = {group.getStore().get(), group.getGroupName(), channel};
  return channel;
}

void drop_host_channel(const c10d::ProcessGroup& group) noexcept {
  std::shared_ptr<HostChannel> ended;  // outlives the lock
  const std::lock_guard<std::mutex> lock(channels().mutex);
  channels().connecting.erase(&group);
  const auto found = channels().entries.find(&group);
  if (found == channels().entries.end()) return;
  ended = std::move(found->second.channel);
  channels().entries.erase(found);
}

}  // namespace apex::parallel
