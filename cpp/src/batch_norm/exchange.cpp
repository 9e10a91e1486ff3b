// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "watch/watched_group.h"

namespace apex::parallel::detail {

namespace {

// Note [Ranks in different layers]
//
// The collectives of a layer are matched by their order. A rank that has skipped or repeated one,
// or is in backward while others are in forward, sends a message that its peers do not expect. In
// shared memory the channel compares the names and sizes of collectives. Over sockets, Gloo ends
// the peer's process by an exception on a Gloo thread if the message is larger, and mixes values
// without an error if it is smaller or equal. So the first message begins with a header that
// identifies the exchange, and every rank checks all headers before it reads a value. Values that
// do not fit into the first message follow in a second one. The first message is an all-to-all with
// a receive buffer that is larger than needed, which an all-to-all allows because each rank chooses
// the lengths that it expects. (All ranks get the same values, so it works as an all-gather. A rank
// sends to all peers at once, while Gloo's all-gather passes messages around a ring.)
//
// A rank that takes part only because of join() does not know the layer, so the other ranks do not
// name it then.

struct Header {
  int64_t bytes = 0;    ///< size of the values that follow
  char what[120] = {};  ///< the exchange, as in errors

  bool matches(const Header& other) const {
    return bytes == other.bytes && std::strcmp(what, other.what) == 0;
  }
};
static_assert(sizeof(Header) % sizeof(double) == 0, "what follows is aligned");

/// Receive buffer for the first message of one rank: a header and the values of 4,000 channels.
constexpr int64_t kRoom = int64_t{64} << 10;

constexpr const char* kRemedy =
    ". Run the same synchronized layers, with the same number of channels and for the same number "
    "of batches, in the same order in forward and backward on every rank; use eval() for a forward "
    "on one rank only";

std::string describe(const Peers& peers, Direction direction) {
  static constexpr const char* kNames[] = {"forward", "backward", "second derivative"};
  return std::string(kNames[static_cast<size_t>(direction)]) + " of " +
         (peers.layer.empty() ? "a SyncBatchNorm" : "SyncBatchNorm '" + peers.layer + "'");
}

std::string describe(const Peers& peers, Direction direction, int64_t channels) {
  return "exchange in " + describe(peers, direction) + " of " + std::to_string(channels) +
         " channels";
}

void refuse_different(const c10d::ProcessGroup& group, const std::vector<Header>& headers) {
  const int rank = group.getRank();
  if (std::all_of(headers.begin(), headers.end(),
                  [&](const Header& header) { return header.matches(headers[rank]); }))
    return;
  std::string text = "rank " + std::to_string(rank) + " of " + std::to_string(headers.size()) +
                     ": the ranks are in different batch norm layers: ";
  for (size_t r = 0; r < headers.size(); ++r)
    text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + " in " + headers[r].what;
  throw RankMismatch(text + kRemedy + note_on_ranks(group));
}

/// Whether Gloo carries the exchange over sockets.
bool uses_sockets(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return false;
  if (const auto host = host_backend_of(group)) return !host->shares_memory();
  return has_backend(group, at::kCPU) &&
         distributed::gloo_options(*group.getBackend(at::kCPU)) != nullptr;
}

/// Runs a collective. A difference between ranks that the channel finds is a RankMismatch.
template <typename Issue>
void run(const std::string& what, const Peers& peers, Issue&& issue) {
  try {
    run_collective(what, *peers.group, issue);
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    if (text.find("the ranks are in different collectives") == std::string::npos) throw;
    throw RankMismatch(text + kRemedy);
  }
}

/// The same over sockets, see Note [Ranks in different layers].
void gather_with_headers(const std::string& what, c10d::ProcessGroup& group,
                         const at::Tensor& gathered, const at::Tensor& local) {
  const auto ranks = static_cast<size_t>(group.getSize());
  constexpr auto kHeader = static_cast<int64_t>(sizeof(Header));
  Header mine;
  mine.bytes = static_cast<int64_t>(local.nbytes());
  // The end of a long name distinguishes layers.
  const size_t skipped = what.size() - std::min(what.size(), sizeof(mine.what) - 1);
  what.copy(mine.what, sizeof(mine.what) - 1, skipped);
  const bool fits = kHeader + mine.bytes <= kRoom;
  const int64_t length = kHeader + (fits ? mine.bytes : 0);
  std::vector<int64_t> lengths(ranks, length), rooms(ranks, kRoom);
  rooms[group.getRank()] = length;  // Gloo requires equal lengths here
  const at::Tensor share = at::empty({length}, at::kByte);
  auto* const sent = share.mutable_data_ptr<uint8_t>();
  std::memcpy(sent, &mine, sizeof(mine));
  if (length > kHeader) std::memcpy(sent + kHeader, local.const_data_ptr(), local.nbytes());
  const at::Tensor received = at::empty({c10::sum_integers(rooms)}, at::kByte);
  run_collective(what, group, [&] {
    return issue_all_to_all(what, group, received, share.repeat({group.getSize()}), rooms, lengths);
  });
  std::vector<Header> headers(ranks);
  const auto* from = received.const_data_ptr<uint8_t>();
  auto* to = static_cast<uint8_t*>(gathered.mutable_data_ptr());
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::memcpy(&headers[rank], from, sizeof(Header));
    if (fits) to = std::copy_n(from + kHeader, mine.bytes, to);
    from += rooms[rank];
  }
  refuse_different(group, headers);
  if (!fits)
    run_collective(what, group, [&] { return issue_all_gather(what, group, gathered, local); });
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> registered_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    return nullptr;  // c10d offers no other query
  }
}

Peers find_peers(c10::string_view group_name, c10::string_view layer) {
  Peers peers{nullptr, std::string(layer)};
  if (group_name.empty()) return peers;
  peers.group = registered_group(std::string(group_name));
  TORCH_CHECK(peers.group, "apex sync batch norm: no process group is registered as '", group_name,
              "'; it was destroyed, or was not created on this rank. Create it on every rank, and "
              "pass its group_name.");
  if (peers.group->getSize() == 1) peers.group.reset();
  return peers;
}

void announce_refused(const Peers& peers, Direction direction) noexcept {
  if (peers) announce_failure(*peers.group, "the arguments of " + describe(peers, direction));
}

at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                      int64_t channels) {
  c10d::ProcessGroup& group = *peers.group;
  const std::string what = describe(peers, direction, channels);
  const at::Tensor gathered = at::empty({group.getSize() * local.numel()}, local.options());
  if (uses_sockets(group, local)) {
    gather_with_headers(what, group, gathered, local);
  } else {
    run(what, peers,
        [&] { return issue_all_gather(what, group, gathered, local, Enqueue::kOnCurrentStream); });
  }
  return gathered;
}

void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction, int64_t channels) {
  c10d::ProcessGroup& group = *peers.group;
  if (uses_sockets(group, tensor)) {
    // Every rank adds in the order of the ranks, and rounds after each addition.
    const auto shares = all_gather(peers, tensor, direction, channels).chunk(group.getSize());
    tensor.copy_(shares[0]);
    for (size_t rank = 1; rank < shares.size(); ++rank) tensor.add_(shares[rank]);
    return;
  }
  const std::string what = describe(peers, direction, channels);
  run(what, peers, [&] {
    return issue_all_reduce(what, group, tensor, c10d::ReduceOp::SUM, Enqueue::kOnCurrentStream);
  });
}

at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                          c10::string_view layer) {
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  if (const Peers peers = find_peers(group_name, layer)) {
    at::Tensor flat = sum.view({-1});
    all_reduce(peers, flat, Direction::kSecondDerivative, sum.numel());
  }
  return sum;
}

}  // namespace apex::parallel::detail
