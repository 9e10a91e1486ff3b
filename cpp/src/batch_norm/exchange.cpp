// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include <ATen/Dispatch.h>
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
  static constexpr size_t kNameLength = 40;
  int64_t bytes = 0;  ///< size of the values that follow
  int64_t channels = 0;
  Direction direction = Direction::kForward;
  int32_t name_length = 0;
  char name[kNameLength] = {};  ///< the last characters of the layer's name

  bool matches(const Header& other) const {
    return bytes == other.bytes && channels == other.channels && direction == other.direction &&
           layer() == other.layer();
  }
  std::string layer() const { return {name, static_cast<size_t>(name_length)}; }
};
static_assert(sizeof(Header) % sizeof(double) == 0, "what follows is aligned");

/// Receive buffer for the first message of one rank: a header and the values of 4,000 channels.
constexpr int64_t kRoom = int64_t{64} << 10;

constexpr const char* kRemedy =
    ". Run the same synchronized layers, with the same number of channels, in the same order in "
    "forward and backward on every rank; use eval() for a forward on one rank only, and "
    "DistributedDataParallel.join() if ranks have different numbers of batches";

const char* name_of(Direction direction) {
  switch (direction) {
    case Direction::kForward:
      return "forward";
    case Direction::kBackward:
      return "backward";
    default:
      return "second derivative";
  }
}

std::string describe(Direction direction, const std::string& layer) {
  return std::string(name_of(direction)) + " of " +
         (layer.empty() ? "a SyncBatchNorm" : "SyncBatchNorm '" + layer + "'");
}

std::string describe(Direction direction, const std::string& layer, int64_t channels) {
  return describe(direction, layer) + " of " + std::to_string(channels) + " channels";
}

std::string describe(const Peers& peers, Direction direction, int64_t channels) {
  return "exchange in " + describe(direction, peers.layer, channels);
}

void refuse_different(const c10d::ProcessGroup& group, const std::vector<Header>& headers) {
  const int rank = group.getRank();
  if (std::all_of(headers.begin(), headers.end(),
                  [&](const Header& header) { return header.matches(headers[rank]); }))
    return;
  std::string text = "rank " + std::to_string(rank) + " of " + std::to_string(headers.size()) +
                     ": the ranks are in different batch norm layers: ";
  for (size_t r = 0; r < headers.size(); ++r) {
    const Header& header = headers[r];
    text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + " in " +
            describe(header.direction, header.layer(), header.channels);
  }
  throw RankMismatch(text + kRemedy + note_on_ranks(group));
}

/// Whether Gloo carries the exchange over sockets.
bool uses_sockets(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return false;
  if (const auto host = host_backend_of(group)) return !host->shares_memory();
  return has_backend(group, at::kCPU) &&
         distributed::gloo_timeout(*group.getBackend(at::kCPU)).has_value();
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
void gather_with_headers(const Peers& peers, const at::Tensor& gathered, const at::Tensor& local,
                         Direction direction, int64_t channels) {
  c10d::ProcessGroup& group = *peers.group;
  const auto ranks = static_cast<size_t>(group.getSize());
  Header mine;
  mine.bytes = static_cast<int64_t>(local.nbytes());
  mine.channels = channels;
  mine.direction = direction;
  const size_t name = std::min(peers.layer.size(), Header::kNameLength);
  mine.name_length = static_cast<int32_t>(name);
  std::copy_n(peers.layer.end() - static_cast<std::ptrdiff_t>(name), name, mine.name);
  constexpr auto kHeader = static_cast<int64_t>(sizeof(Header));
  const bool fits = kHeader + mine.bytes <= kRoom;
  const int64_t length = kHeader + (fits ? mine.bytes : 0);
  std::vector<int64_t> lengths(ranks, length), rooms(ranks, kRoom);
  rooms[group.getRank()] = length;  // Gloo requires equal lengths here
  const at::Tensor share = at::empty({length}, at::kByte);
  auto* const sent = share.mutable_data_ptr<uint8_t>();
  std::memcpy(sent, &mine, sizeof(mine));
  if (length > kHeader) std::memcpy(sent + kHeader, local.const_data_ptr(), local.nbytes());
  const at::Tensor received = at::empty({c10::sum_integers(rooms)}, at::kByte);
  const std::string what = describe(peers, direction, channels);
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
  if (fits) return;
  const char* const values = "values of a SyncBatchNorm";
  run_collective(values, group, [&] { return issue_all_gather(values, group, gathered, local); });
}

/// Sums in the order of the ranks, and rounds to T after each addition.
template <typename T>
void sum_values(at::Tensor& sums, const at::Tensor& gathered) {
  T* const to = sums.mutable_data_ptr<T>();
  const T* from = gathered.const_data_ptr<T>();
  const int64_t numel = sums.numel();
  std::copy_n(from, numel, to);
  for (const T* end = from + gathered.numel(); (from += numel) < end;) {
    for (int64_t i = 0; i < numel; ++i) to[i] = to[i] + from[i];
  }
}

}  // namespace

Peers find_peers(c10::string_view group_name, c10::string_view layer) {
  Peers peers{nullptr, std::string(layer)};
  if (group_name.empty()) return peers;
  try {
    peers.group = c10d::resolve_process_group(std::string(group_name));
  } catch (const std::exception&) {
    TORCH_CHECK(false, "apex sync batch norm: no process group is registered as '", group_name,
                "'; it was destroyed, or was not created on this rank. Create it on every rank, "
                "and pass its group_name.");
  }
  if (peers.group->getSize() == 1) peers.group.reset();
  return peers;
}

BeforeExchange::BeforeExchange(const Peers& peers, Direction direction)
    : peers_(peers), direction_(direction), exceptions_(std::uncaught_exceptions()) {}

BeforeExchange::~BeforeExchange() {
  if (!peers_ || std::uncaught_exceptions() == exceptions_) return;
  announce_failure(*peers_.group, "the arguments of " + describe(direction_, peers_.layer));
}

at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                      int64_t channels) {
  c10d::ProcessGroup& group = *peers.group;
  const at::Tensor gathered = at::empty({group.getSize() * local.numel()}, local.options());
  if (uses_sockets(group, local)) {
    gather_with_headers(peers, gathered, local, direction, channels);
  } else {
    const std::string what = describe(peers, direction, channels);
    run(what, peers,
        [&] { return issue_all_gather(what, group, gathered, local, Enqueue::kOnCurrentStream); });
  }
  return gathered;
}

void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction, int64_t channels) {
  c10d::ProcessGroup& group = *peers.group;
  if (uses_sockets(group, tensor)) {
    const at::Tensor gathered = all_gather(peers, tensor, direction, channels);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "all_reduce",
                                    [&] { sum_values<scalar_t>(tensor, gathered); });
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
