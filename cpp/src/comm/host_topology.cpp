// SPDX-License-Identifier: BSD-3-Clause
#include "comm/host_topology.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
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

#include "comm/by_group.h"
#include "comm/collectives.h"
#include "comm/failure_report.h"
#include "comm/process_state.h"
#include "comm/separate_group.h"
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

/// A rank's memory for one channel, and what it says of it.
struct Offer {
  Introduction mine;
  Finding finding;
  std::shared_ptr<HostMemory> memory;
};

Offer make_offer() {
  Offer offer;
  const auto process = this_process();
  if (is_switched_off() || !process) return offer;
  put(offer.mine.process, process->encode());
  try {
    offer.memory = HostMemory::create(HostChannel::kFirstBytes);
    HostChannel::prepare(*offer.memory);
    std::random_device random;
    offer.mine.number = uint64_t{random()} << 32 | random();
    std::memcpy(offer.memory->first() + kNumberAt, &offer.mine.number, sizeof(offer.mine.number));
    offer.mine.first = offer.memory->first_place();
  } catch (const std::exception& error) {
    put(offer.finding.problem, error.what());
  }
  return offer;
}

/// Which process each rank is; none if one of them wants no channel, or two are the same. All ranks
/// see the same: those that differ in what they read here would differ in what they do.
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

/// Maps the memory of `among`, ranks of this host; notes the first problem.
std::vector<HostChannel::Peer> map_peers(int self, const std::vector<int>& among,
                                         const std::vector<Introduction>& ranks, Finding& finding) {
  std::vector<HostChannel::Peer> peers(among.size());
  for (size_t i = 0; i < among.size(); ++i) {
    const auto rank = static_cast<size_t>(among[i]);
    HostChannel::Peer& peer = peers[i];
    peer.process = ProcessName::decode(ranks[rank].process);
    peer.first = ranks[rank].first;
    peer.named = among[i];
    // Who has none says why.
    if (among[i] == self || peer.first.fd < 0 || finding.problem[0] != 0) continue;
    try {
      peer.memory = std::make_unique<PeerMemory>(peer.process->pid);
      uint64_t number = 0;
      std::memcpy(&number, peer.memory->at(peer.first) + kNumberAt, sizeof(number));
      if (number != ranks[rank].number) throw Error("it holds something else");
    } catch (const std::exception& error) {
      put(finding.problem, "memory of rank " + std::to_string(rank) + ": " + error.what());
    }
  }
  return peers;
}

/// Whether no rank has found a problem; else each logs the first.
bool all_are_fine(c10d::ProcessGroup& group, const Finding& mine, const char* what) {
  const std::vector<Finding> findings = exchange(group, mine);
  for (size_t rank = 0; rank < findings.size(); ++rank) {
    if (findings[rank].problem[0] == 0) continue;
    TORCH_WARN("apex: the ranks talk through the process group, since rank ", rank, " of ",
               findings.size(), " cannot ", what, " (", findings[rank].problem,
               "); APEX_HOST_CHANNEL=0 skips the attempt");
    return false;
  }
  return true;
}

struct Connected {
  std::shared_ptr<HostChannel> channel;
  /// The ranks are on several hosts, and may have a hierarchy.
  bool several_hosts = false;
};

Connected connect(c10d::ProcessGroup& group, std::chrono::milliseconds timeout) {
  Offer offer = make_offer();
  const std::vector<Introduction> ranks = exchange(group, offer.mine);
  std::vector<std::string> host_of;
  for (const ProcessName& process : processes_of(ranks)) host_of.push_back(process.host);
  if (host_of.empty()) return {};
  const HostLayout layout = lay_out(host_of, group.getRank());
  if (layout.hosts.size() > 1) return {nullptr, layout.worthwhile()};
  if (ranks.size() > HostChannel::kMostRanks) return {};
  auto peers = map_peers(group.getRank(), layout.hosts.front(), ranks, offer.finding);
  if (!all_are_fine(group, offer.finding, "share memory")) return {};
  return {std::make_shared<HostChannel>(group.getRank(), std::move(offer.memory), std::move(peers),
                                        timeout)};
}

/// For a group whose ranks are on several hosts.
std::shared_ptr<HostHierarchy> connect_hosts(c10d::ProcessGroup& group,
                                             std::chrono::milliseconds timeout) {
  Offer sums = make_offer();
  Offer results = make_offer();
  const std::vector<Introduction> ranks = exchange(group, sums.mine);
  const std::vector<Introduction> again = exchange(group, results.mine);
  std::vector<std::string> host_of;
  for (const ProcessName& process : processes_of(ranks)) host_of.push_back(process.host);
  if (host_of.empty() || processes_of(again).empty()) return nullptr;
  const int self = group.getRank();
  const HostLayout layout = lay_out(host_of, self);
  const bool too_many = std::any_of(layout.hosts.begin(), layout.hosts.end(), [](const auto& host) {
    return host.size() > HostChannel::kMostRanks;
  });
  if (!layout.worthwhile() || too_many) return nullptr;

  const std::vector<int>& here = layout.hosts[layout.host];
  Finding finding = sums.finding.problem[0] != 0 ? sums.finding : results.finding;
  auto sum_peers = map_peers(self, here, ranks, finding);
  auto result_peers = map_peers(self, here, again, finding);
  if (!all_are_fine(group, finding, "share memory")) return nullptr;

  HierarchyLinks links;
  if (here.size() > 1) {
    links.sums = std::make_shared<HostChannel>(layout.place, std::move(sums.memory),
                                               std::move(sum_peers), timeout);
    links.results = std::make_shared<HostChannel>(layout.place, std::move(results.memory),
                                                  std::move(result_peers), timeout);
  }
  // In the store, nobody has used a name with this number before.
  const std::string name = "apex/hosts/" + std::to_string(ranks.front().number) + "/" +
                           std::to_string(layout.place) + "/";
  const auto parent = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group);
  try {
    const auto hosts = static_cast<int>(layout.hosts.size());
    if (layout.in_column()) {
      links.exchange = connect_some(parent, name + "exchange", layout.host, hosts);
      if (hosts > 2) links.gather = connect_some(parent, name + "gather", layout.host, hosts);
    }
  } catch (const std::exception& error) {
    put(finding.problem, error.what());
  }
  auto hierarchy = std::make_shared<HostHierarchy>(layout, std::move(links));
  if (all_are_fine(group, finding, "connect to its counterparts on other hosts")) return hierarchy;
  hierarchy->give_up("not all ranks have connected");
  return nullptr;
}

/// What has been connected for a group; it ends some calls after the group.
struct Channels {
  struct Entry {
    Connected connected;
    /// Set by the first call of host_hierarchy_of().
    std::optional<std::shared_ptr<HostHierarchy>> hierarchy;
  };
  /// So often it is looked whether groups are gone.
  static constexpr uint64_t kLooksEvery = 256;

  std::mutex mutex;  ///< guards the rest; not held while ranks meet
  uint64_t calls = 0;
  ByGroup<Entry> entries;
  /// Held while ranks meet, by group: threads may connect two groups in another order than those of
  /// another rank do.
  ByGroup<std::shared_ptr<std::mutex>> connecting;

  std::shared_ptr<std::mutex> connecting_of(const c10d::ProcessGroup& group) {
    std::vector<std::shared_ptr<std::mutex>> gone;  // outlives the lock
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto* const found = connecting.find(group)) return *found;
    gone = connecting.take_gone();
    const auto made = std::make_shared<std::mutex>();
    connecting.put(group, made);
    return made;
  }

  std::optional<Entry> find(const c10d::ProcessGroup& group) {
    std::vector<Entry> gone;  // outlives the lock
    const std::lock_guard<std::mutex> lock(mutex);
    if (++calls % kLooksEvery == 0) gone = entries.take_gone();
    const Entry* const found = entries.find(group);
    return found == nullptr ? std::nullopt : std::optional<Entry>(*found);
  }

  void set(const c10d::ProcessGroup& group, Entry entry) {
    std::vector<Entry> gone;  // outlives the lock
    const std::lock_guard<std::mutex> lock(mutex);
    gone = entries.take_gone();
    if (auto before = entries.take(group)) gone.push_back(std::move(*before));
    entries.put(group, std::move(entry));
  }
};

// Never destroyed: groups may be used while the process ends.
Channels& channels() {
  static auto* const instance = new Channels;
  return *instance;
}

std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group) {
  if (!detail::has_backend(group, at::kCPU)) return std::nullopt;
  return distributed::gloo_timeout(*group.getBackend(at::kCPU));
}

}  // namespace

std::shared_ptr<HostChannel> host_channel_of(const c10d::ProcessGroup& given) {
  if (given.getSize() == 1) return nullptr;
  Channels& all = channels();
  if (const auto found = all.find(given)) return found->connected.channel;
  const std::shared_ptr<std::mutex> of_group = all.connecting_of(given);
  const std::lock_guard<std::mutex> connecting(*of_group);
  if (const auto found = all.find(given)) return found->connected.channel;
  auto& group = const_cast<c10d::ProcessGroup&>(given);
  Channels::Entry entry;
  if (const auto timeout = timeout_of(group)) entry.connected = connect(group, *timeout);
  all.set(given, entry);
  return entry.connected.channel;
}

std::shared_ptr<HostHierarchy> host_hierarchy_of(const c10d::ProcessGroup& given) {
  if (given.getSize() == 1) return nullptr;
  host_channel_of(given);
  Channels& all = channels();
  const std::shared_ptr<std::mutex> of_group = all.connecting_of(given);
  const std::lock_guard<std::mutex> connecting(*of_group);
  auto entry = all.find(given);
  if (!entry || !entry->connected.several_hosts) return nullptr;
  if (!entry->hierarchy) {
    auto& group = const_cast<c10d::ProcessGroup&>(given);
    entry->hierarchy = connect_hosts(group, *timeout_of(group));
    all.set(given, *entry);
  }
  return *entry->hierarchy;
}

std::shared_ptr<HostHierarchy> find_host_hierarchy(const c10d::ProcessGroup& group) {
  const auto found = channels().find(group);
  return found && found->hierarchy ? *found->hierarchy : nullptr;
}

std::shared_ptr<HostChannel> channel_of_one(std::chrono::milliseconds timeout) {
  Offer offer = make_offer();
  if (!offer.memory || offer.finding.problem[0] != 0) return nullptr;
  return std::make_shared<HostChannel>(0, std::move(offer.memory),
                                       std::vector<HostChannel::Peer>(1), timeout);
}

void drop_host_channel(const c10d::ProcessGroup& group) noexcept {
  std::optional<Channels::Entry> ended;  // outlives the lock
  {
    const std::lock_guard<std::mutex> lock(channels().mutex);
    channels().connecting.take(group);
    ended = channels().entries.take(group);
  }
  // Others are not waited for who will not come.
  if (ended && ended->hierarchy && *ended->hierarchy && has_failed(group))
    (*ended->hierarchy)->give_up("a collective of this group has failed");
}

}  // namespace apex::parallel
